"""Saves and loads: what stands in each file, and plain objects.

What a run unpickles is plain: a file that names a function, or an unknown class, is refused before torch reads it.

Torch reads an archive safely if it is asked to (``weights_only``). Megatron 0.12 does not ask, and neither does torch
itself where it reads objects of a distributed checkpoint. Here it is made to, with the classes that Megatron stores.
``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``, torch's own switch, turns that off.

This is about what torch and Megatron load in a run, and gives the objects that they expect. The plugin's own tools read
with :mod:`vtp_plugin.checkpoint.format.safe_pickle`, which makes no object that a file names.

`bucket-map/file`: beside a checkpoint lies a map of the distributed optimizer's buckets.

`checkpoint-timeout/core-load`: a load that stands still ends. `safe-load/common-objects`: what all ranks share runs
nothing.
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
from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from pathlib import Path, PosixPath
from typing import Any, Final

import numpy
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from vtp_plugin.checkpoint.format.checkpoint_files import (
    COMMON_FILE,
    TORCH_DIST,
    called_names,
    format_of,
    naming_broken_files,
)
from vtp_plugin.checkpoint.format.index import INDEX, DamagedError, Extent, Index, is_unknown, names_more, read_extent
from vtp_plugin.checkpoint.format.resolver import BY_BUCKET, BY_BUCKET_OLDER, FORM, TYPE
from vtp_plugin.checkpoint.format.shard_map import MAP, Bucket, dump_map
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.one_site import as_one_site, is_own_part
from vtp_plugin.patches.core.optimizer.moved_state import MapPart
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.comm.plain_data import ObjectError
from vtp_plugin.session import Session
from vtp_plugin.util.typed_json import problem_of
from vtp_plugin.util.undo import Item, UndoStack

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
    if module.partition(".")[0] not in _PACKAGES:
        return None
    if _is_named_tuple(found):
        return found
    if _acts(found):
        return None
    # Only what its class would check is called for it.
    return found if dataclasses.is_dataclass(found) or not _is_called(name, file) else None


def _is_named_tuple(kind: type) -> bool:
    """Tell whether a class is a named tuple as Python writes it, which only keeps what it is given."""
    is_made = kind.__bases__ == (tuple,) and kind.__new__.__module__ == f"namedtuple_{kind.__name__}"
    return is_made and not hasattr(kind, "__setstate__") and not hasattr(kind, "__del__")


def _acts(kind: type) -> bool:
    """Tell whether a class does something when an object is made, filled or let go without its constructor."""
    has_own = kind.__new__ is not object.__new__ or type(kind) is not type
    return has_own or hasattr(kind, "__setstate__") or hasattr(kind, "__del__")


def _is_called(name: str, file: Path | BytesIO) -> bool:
    try:
        return isinstance(file, BytesIO) or name in called_names(file.parent, Extent(file.name))
    except DamagedError:
        return True


@replaces(
    "megatron.core.dist_checkpointing.serialization:save",
    id="bucket-map/file",
    when=Moment.LIST,
    remove_when="with `bucket-map`",
    aliases=("megatron.core.dist_checkpointing:save",),
)
def _save(session: Session, original: Callable[..., Any], state: Any, folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `save`, watched as by `checkpoint-timeout`; rank 0 then writes the map.

    Why: the map that `bucket-map` makes, part by part, is one file beside what is stored.

    It does so before what is saved in the background is complete.
    """
    is_by_bucket = _is_by_bucket(state, kwargs.get("content_metadata") or {}) and "://" not in str(folder)
    values = nested_values(state) if is_by_bucket else ()
    parts = [value.obj for value in values if isinstance(value, LocalNonpersistentObject)]
    own = [part.buckets() for part in parts if isinstance(part, MapPart)]
    is_part = (saving := session.savings.find(folder)) is not None and saving.part is not None
    with session.ranks.together("the save of a checkpoint"), as_one_site(session, is_meant=is_part):
        result = original(state, folder, *args, **kwargs)
        if is_by_bucket:
            _write(Path(folder), own, session.parts.open(session.planned) if is_part else None)
    if is_part and result is not None:  # the rest comes when all is written
        result.finalize_fns[:] = [functools.partial(_end_part, session, end) for end in result.finalize_fns]
    return result


def _end_part(session: Session, end: Callable[[], None]) -> None:
    with as_one_site(session):
        end()


@replaces(
    "megatron.core.dist_checkpointing.serialization:load",
    id="checkpoint-timeout/core-load",
    when=Moment.LIST,
    remove_when="with `checkpoint-timeout`",
    aliases=("megatron.core.dist_checkpointing:load",),
)
def _load(session: Session, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `load`, watched; torch wraps what is refused while it reads.

    Why: scripts on megatron-core call it without what `checkpoint-timeout` watches.

    A site reads its part of a checkpoint by itself.
    """
    folder = kwargs.get("checkpoint_dir", *args[1:2])
    try:
        with session.ranks.together("the load of a checkpoint"), naming_broken_files(None):
            is_part = "://" not in str(folder) and is_own_part(session, Path(folder))
            with as_one_site(session, is_meant=is_part):
                return original(*args, **kwargs)
    finally:
        session.loading.drop_index()


@replaces(
    "megatron.core.dist_checkpointing.serialization:load_common_state_dict",
    id="safe-load/common-objects",
    when=Moment.LIST,
    remove_when="torch asks for plain values there",
    unneeded={"<0.19": "there it is a file, which `safe-load/common-file` carries"},
    aliases=("megatron.core.dist_checkpointing:load_common_state_dict",),
)
def _load_shared(session: Session, original: Callable[..., Any], checkpoint_dir: Any) -> Any:
    """Run `load_common_state_dict` for plain values.

    Why: torch's own planner, which it uses, asks torch to make whatever an object names.
    """
    common = None if "://" in str(checkpoint_dir) else common_of(session, Path(checkpoint_dir))
    with plain_only(common, f"what all ranks share in {checkpoint_dir}"):
        return original(checkpoint_dir)


def _is_by_bucket(state: Any, content: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer is stored by bucket; all ranks know it alike."""
    if content.get(FORM) == BY_BUCKET:
        return True
    stored = state.get("optimizer") if isinstance(state, dict) else None
    parts = (stored, *stored.values()) if isinstance(stored, dict) else ()
    return any(isinstance(part, dict) and part.get(TYPE) == BY_BUCKET_OLDER for part in parts)


def _write(folder: Path, own: list[tuple[Bucket, ...] | None], group: dist.ProcessGroup | None) -> None:
    """Write what all ranks have, on the first one, if all know it; who reads the file finds it whole or not at all."""
    is_writer = dist.get_rank(group) == 0
    found: list[Any] | None = [None] * dist.get_world_size(group) if is_writer else None
    dist.gather_object(own, found, dst=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if found is None:
        return
    text = _text_of(found)
    # Another save into this folder may have left one.
    (folder / MAP).unlink(missing_ok=True)
    if text is not None:
        partial = folder / f"{MAP}.partial"
        partial.write_text(text)
        partial.replace(folder / MAP)


def _text_of(found: list[Any]) -> str | None:
    """Write the parts of all ranks as one map; None where a rank does not know its part.

    Raises:
        PeerError: another site has sent what is no part of a map.
    """
    try:
        parts = [part for of_rank in found for part in of_rank]
        if not parts or None in parts:
            return None
        return dump_map(sorted((each for part in parts for each in part), key=lambda each: each.key))
    except Exception as error:  # of whatever kind: of such objects only the classes are known
        raise ObjectError(f"is no part of the map of a checkpoint ({type(error).__name__})") from error
