"""What a run unpickles is plain: a file that names a function, or an unknown class, is refused before torch reads it.

Torch reads an archive safely if it is asked to (``weights_only``). Megatron 0.12 does not ask, and neither does torch
itself where it reads objects of a distributed checkpoint. Here it is made to, with the classes that Megatron stores.
``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``, torch's own switch, turns that off.

This is about what torch and Megatron load in a run, and gives the objects that they expect. The plugin's own tools read
with :mod:`vtp_plugin.checkpoint.format.safe_pickle`, which makes no object that a file names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import os
import signal
import sys
import types
from argparse import Namespace
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any, Final

import numpy
import torch

from vtp_plugin.checkpoint.format.archive import called_names
from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE, TORCH_DIST, format_of
from vtp_plugin.checkpoint.format.entries import DamagedError, Extent, read_extent
from vtp_plugin.checkpoint.format.index import INDEX, Index
from vtp_plugin.checkpoint.format.untrusted import is_unknown, names_more
from vtp_plugin.errors import ConfigError
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Item, UndoStack
from vtp_plugin.util.untrusted_files import problem_of

_FORCE, _SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ARRAYS: Any = importlib.import_module("numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray")
# They only keep what they are given. From 0.15 on Megatron itself names them to torch.
_HARMLESS: Final[dict[str, Any]] = {
    "argparse.Namespace": Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": PosixPath,
    "_io.BytesIO": BytesIO,
    "signal.Signals": signal.Signals,
    "numpy.ndarray": numpy.ndarray,
    "numpy.dtype": numpy.dtype,
    **{
        f"{module}.{name}": getattr(_ARRAYS, name)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name in ("_reconstruct", "scalar")
    },
}
# Numbers; what holds objects is left out.
_DTYPES: Final = tuple({type(numpy.dtype(code)) for code in numpy.typecodes["AllInteger"] + numpy.typecodes["Float"]})
_COMMON: Final = "common_state/"
_PACKAGES: Final = ("megatron", "mindspeed", "mindspeed_llm", "mindspeed_mm", "vtp_plugin")


@contextlib.contextmanager
def plain_only(file: Path | BytesIO | None, said: str) -> Iterator[None]:
    """Let ``torch.load`` make plain values only, whatever it is asked for.

    Args:
        file: the archive that is read; None if there is none, and nothing is changed.
        said: what errors call it.

    Raises:
        UntrustedError: it names what may run.
    """
    if file is None or _is_off():
        yield
        return
    found = _classes_of(file, said)
    # What torch knows already stays known afterwards.
    known = torch.serialization.get_safe_globals()
    allowed = (*((each, name) for name, each in _HARMLESS.items()), *_DTYPES, *found)
    added: list[Any] = [each for each in allowed if each not in known]
    with torch.serialization.safe_globals(added), UndoStack().during(Item(os.environ, _FORCE), "1"):
        yield


def require_plain(file: Path | BytesIO, said: str) -> None:
    """Refuse an archive that names what may run when it is read.

    Raises:
        UntrustedError: it is so.
    """
    if not _is_off():
        _classes_of(file, said)


def require_plain_checkpoint(session: Session, checkpoint: Path) -> None:
    """Refuse a distributed checkpoint of which what every rank reads names what may run.

    Objects of single ranks are looked at by the rank that reads them (`safe-load/planner`), where Megatron reads them.

    Raises:
        UntrustedError: it is so.
        ConfigError: its index is damaged.
    """
    if (common := checkpoint / COMMON_FILE).exists():
        require_plain(common, str(common))
    _objects_of(session, checkpoint)


def _objects_of(session: Session, checkpoint: Path) -> Mapping[str, Extent]:
    """Return where the objects of a checkpoint lie, by key; none where it has no index."""
    if not (checkpoint / INDEX).exists():
        return {}
    return session.loading.objects_of(checkpoint, functools.partial(_require_plain_objects, checkpoint))


def index_of(session: Session, checkpoint: Path) -> Index | None:
    """Return the index of a distributed checkpoint, which a load reads once; None where there is none.

    Raises:
        UntrustedError: it names what may run.
        ConfigError: it is damaged.
    """
    if not (checkpoint / INDEX).exists():
        return None
    return session.loading.index_of(checkpoint, functools.partial(_require_plain_objects, checkpoint))


def _require_plain_objects(checkpoint: Path, objects: Mapping[str, Extent]) -> None:
    # What torch reads itself, in other formats, nobody else looks at.
    prefix = _COMMON if format_of(checkpoint) == TORCH_DIST else ""
    for key, extent in objects.items():
        if key.startswith(prefix):
            require_plain(BytesIO(read_extent(checkpoint, extent)), f"{key} in {checkpoint / extent.file}")


def common_of(session: Session, checkpoint: Path) -> Path | BytesIO | None:
    """Return what all ranks share of a distributed checkpoint: a file, or an object; None if there is none."""
    if (common := checkpoint / COMMON_FILE).exists():
        return common
    objects = _objects_of(session, checkpoint)
    extent = next((extent for key, extent in objects.items() if key.startswith(_COMMON)), None)
    return None if extent is None else BytesIO(read_extent(checkpoint, extent))


def _is_off() -> bool:
    return os.environ.get(_SWITCH, "0").lower() in ("1", "y", "yes", "true")


def _classes_of(file: Path | BytesIO, said: str) -> list[Any]:
    """Give what torch must be allowed to make, to read an archive."""
    if isinstance(file, Path) and file.exists() and (problem := problem_of(file)) is not None:
        raise ConfigError(f"{said} {problem}; it must be a file as torch.save writes it; copy it again")
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file if isinstance(file, BytesIO) else str(file))
    except (OSError, RuntimeError):  # torch's reader cannot open it, and says so again
        return []
    except Exception as error:
        raise is_unknown(said, error) from None
    finally:
        if isinstance(file, BytesIO):
            file.seek(0)
    found: list[Any] = []
    for name in sorted(names):
        each = _HARMLESS.get(name) or _class(name, file)
        if each is None:
            raise names_more(said, name)
        found.append((each, name))
    return [each for each in found if each[1] not in _HARMLESS]


def _class(name: str, file: Path | BytesIO) -> Any:
    """Return an enumeration, or a class of Megatron's or MindSpeed's that keeps values; None for anything else."""
    module, _, own = name.rpartition(".")
    found = vars(sys.modules[module]).get(own) if module in sys.modules else None
    if not isinstance(found, type) or (found.__module__, found.__qualname__) != (module, own):
        return None
    if issubclass(found, enum.Enum):
        return found
    if module.partition(".")[0] not in _PACKAGES or _acts(found):
        return None
    # Only what its class would check is called for it.
    return found if dataclasses.is_dataclass(found) or not _is_called(name, file) else None


def _acts(kind: type) -> bool:
    """Tell whether a class does something when an object is made, filled or let go without its constructor."""
    has_own = kind.__new__ is not object.__new__ or type(kind) is not type
    return has_own or hasattr(kind, "__setstate__") or hasattr(kind, "__del__")


def _is_called(name: str, file: Path | BytesIO) -> bool:
    try:
        return isinstance(file, BytesIO) or name in called_names(file.parent, Extent(file.name))
    except DamagedError:
        return True
