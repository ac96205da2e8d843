"""Files of a checkpoint, which somebody else may have written: archives, digests, folders.

Finds missing, cut off or damaged files of a Megatron checkpoint, and what can be loaded instead.

A folder of checkpoints has the file ``latest_checkpointed_iteration.txt``, which names one of its folders
``iter_0000100`` or ``release``. Such a folder holds, as ``--ckpt-format torch_dist``, ``metadata.json``, ``*.distcp``
and ``.metadata``, which says where in which file each tensor lies; before Megatron 0.19 also ``common.pt``. In the
format ``torch`` it holds a folder ``mp_rank_*`` for each rank of a replica. Where this plugin saved it there is a
manifest, too: files that the ranks read piece by piece are checked then, and all others here.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import (
    INDEX,
    MANIFEST,
    DamagedError,
    Extent,
    Index,
    Manifest,
    bytes_of,
    entry_name,
    load_manifest,
    opened,
    place_of,
    problems_of_pieces,
    problems_of_sizes,
    stored_lengths,
)
from vtp_plugin.checkpoint.format.resolver import (
    RELEASE,
    TRACKER,
    Asked,
    Found,
    number_of,
    numbers_in,
    of_iteration,
    read_tracker,
)
from vtp_plugin.checkpoint.format.safe_pickle import PickledObject, Reference, load_safely, names_called
from vtp_plugin.checkpoint.format.shard_map import row_major
from vtp_plugin.errors import ConfigError, VtpError, refuse
from vtp_plugin.util.typed_json import PathError, count, problem_of, read_json

_STORAGES: Final = {
    "BFloat16Storage": "bfloat16",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "ShortStorage": "int16",
}
_REBUILD: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_READ_BYTES: Final = 1 << 20
_VALUES_PER_BYTE: Final = 8


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the elements of a tensor lie, one after another.

    Attributes:
        file: path of the file.
        offset: offset of the first element in the file, in bytes.
        dtype: name of the elements' type, as torch calls it.
        shape: shape of the tensor.
    """

    file: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]


def _read_pickle(archive: zipfile.ZipFile) -> tuple[Any, int]:
    """Read the pickle of an archive; also give the number of values that it may hold, counted at each occurrence.

    A value may occur in many places, and these in many others: so a few bytes could keep a reader busy for ever.
    """
    data = archive.read(entry_name(archive, "data.pkl"))
    return load_safely(data), _VALUES_PER_BYTE * len(data)


class _Budget:
    """Counts values down.

    Args:
        left: number of values that there may be.
    """

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self) -> None:
        """Count one.

        Raises:
            DamagedError: it is one too many.
        """
        self._left -= 1
        if self._left < 0:
            raise DamagedError("holds some values too often")


def load_object(folder: Path, extent: Extent) -> Any:
    """Read an object without importing its classes; tensors of one element become numbers.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        value, most = _read_pickle(archive)
        return _with_numbers(value, archive, _Budget(most))


def called_names(folder: Path, extent: Extent) -> frozenset[str]:
    """List the classes and functions that torch would call to read an object.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        return names_called(archive.read(entry_name(archive, "data.pkl")))


def find_payload(folder: Path, extent: Extent) -> Payload:
    """Find the elements of a tensor, or of one inside an object.

    Raises:
        DamagedError: it cannot be read, or is no tensor whose elements lie in order.
    """
    with opened(folder, extent) as archive:
        stored, most = _read_pickle(archive)
        tensor = dict(_tensors(stored, _Budget(most))).get(extent.path) if extent.path else _tensor(stored)
        if tensor is None:
            raise DamagedError(f"holds no tensor at byte {extent.offset}")
        storage, begin, shape, strides, dtype = tensor
        in_order = zip(shape, strides, row_major(shape), strict=True)
        if math.prod(shape) and any(length > 1 and stride != right for length, stride, right in in_order):
            raise DamagedError(f"holds a tensor whose elements do not lie in order at byte {extent.offset}")
        entry = archive.getinfo(entry_name(archive, f"data/{storage}"))
        offset = place_of(archive, entry, begin * itemsize(dtype), math.prod(shape) * itemsize(dtype))
        return Payload(folder / extent.file, offset + extent.offset, dtype, shape)


def tensors_inside(folder: Path, extent: Extent) -> Iterator[tuple[Extent, str, tuple[int, ...]]]:
    """Yield the tensors inside an object: where each lies, its type and its shape. No elements are read.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        stored, most = _read_pickle(archive)
        found = [*_tensors(stored, _Budget(most))]
    for path, (_, _, shape, _, dtype) in found:
        yield replace(extent, path=path), dtype, shape


def check_archive(folder: Path, extent: Extent) -> str | None:
    """Read all of an archive; say what is wrong with it, or None."""
    try:
        with opened(folder, extent) as archive:
            _read_pickle(archive)
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    while file.read(_READ_BYTES):  # at its end it compares the sum of all bytes
                        pass
    except DamagedError as error:
        return str(error)
    return None


def read_archive(folder: Path, extent: Extent) -> dict[str, bytes]:
    """Read all entries of an archive.

    Raises:
        DamagedError: it cannot be read.
    """
    with opened(folder, extent) as archive:
        return {entry.filename: archive.read(entry) for entry in archive.infolist()}


_ITEMSIZES: Final = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "uint8": 1,
}


def itemsize(dtype: str) -> int:
    """Return the bytes of an element.

    >>> itemsize("bfloat16"), itemsize("float8_e4m3fn")
    (2, 1)
    """
    return _ITEMSIZES.get(dtype, 1)  # what is not listed has eight bits


_TensorRef = tuple[str, int, tuple[int, ...], tuple[int, ...], str]


def _tensors(value: Any, budget: _Budget, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], _TensorRef]]:
    """Yield all tensors in lists and dictionaries, with the keys that lead to each."""
    budget.take()
    if (tensor := _tensor(value)) is not None:
        yield path, tensor
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _tensors(each, budget, (*path, str(index)))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, budget, (*path, _key_text(key)))


def _key_text(key: Any) -> str:
    """Write a key as the writer's Python would.

    >>> _key_text((0, "a"))
    '(0, a)'
    """
    if isinstance(key, tuple):
        return f"({', '.join(map(_key_text, key))})"
    return ".".join(key.origin) if isinstance(key, type) and issubclass(key, PickledObject) else str(key)


def _tensor(value: Any) -> _TensorRef | None:
    """Give a tensor's storage key, offset, shape, strides and type; None if the value is no tensor."""
    if isinstance(value, PickledObject) and value.name == "torch._utils._rebuild_parameter":
        value = value.args[0]
    if not isinstance(value, PickledObject) or value.name not in _REBUILD or not isinstance(value.args[0], Reference):
        return None
    reference, begin, shape, strides, *rest = value.args
    _, kind, storage, *_ = reference.pid
    # The newer function is for types that have no storage of their own, and says which.
    dtype = rest[2].origin[1] if value.name == _REBUILD[1] else _STORAGES.get(kind.origin[1], kind.origin[1])
    if not isinstance(storage, str):
        raise DamagedError("names elements by no text")
    return storage, count(begin), tuple(map(count, shape)), tuple(map(count, strides)), str(dtype)


_FORMATS: Final = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "int16": "h", "uint8": "B"}


def _with_numbers(value: Any, archive: zipfile.ZipFile, budget: _Budget) -> Any:
    """Replace each tensor of one element by its number, in lists and dictionaries."""
    budget.take()
    if isinstance(value, dict):
        read: dict[Any, Any] = value
        return {key: _with_numbers(each, archive, budget) for key, each in read.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_numbers(each, archive, budget) for each in value)
    tensor = _tensor(value)
    if tensor is None or math.prod(tensor[2]) != 1 or tensor[4] not in _FORMATS:
        return value
    entry = archive.getinfo(entry_name(archive, f"data/{tensor[0]}"))
    (number,) = struct.unpack(
        f"<{_FORMATS[tensor[4]]}", bytes_of(archive, entry, tensor[1] * itemsize(tensor[4]), itemsize(tensor[4]))
    )
    return number


COMMON_FILE: Final = "common.pt"
"""The name of the file with what all ranks share; from Megatron 0.19 on that is an object beside the tensors."""
TORCH_DIST: Final = "torch_dist"
"""The format of checkpoints that any layout loads."""


def check_trackers(asked: Asked) -> Iterator[str]:
    """Say what is wrong with the notes about the newest checkpoints of the folders that a run looks into.

    A folder without note and without a whole checkpoint is right: the run that writes into it begins. ``--ckpt-step``
    needs no tracker; but Megatron reads one that is there.

    Args:
        asked: where the run looks.

    Yields:
        Lines ``value; rule; way out``.

    Raises:
        ConfigError: a tracker is no regular file, or too long.
    """
    passed_over = replace(asked, load_dir=asked.passed_over, kind=None).folders
    for folder, is_persistent in (*asked.folders, *passed_over):
        text = asked.tracker(folder)
        is_right = text is not None and re.fullmatch(r"\d+|release" if is_persistent else r"\d+", text)
        if is_right or folder in asked.trackers:
            continue
        whole = iterations(folder, is_whole=True)
        is_older = not is_persistent and max(whole, default=-1) < number_of(asked.tracker(asked.folder))
        if text is None and (asked.step or not whole or is_older):
            continue
        shown = "is missing" if text is None else f"holds {text[:40]!r}" if text else "is empty"
        rule = f"it must hold the iteration of a checkpoint{', or the word release' if is_persistent else ''}"
        none = "load another folder, or leave --load out" if is_persistent else "move its folder away"
        yield f"{folder / TRACKER} {shown}; {rule}; {f'write {whole[-1]} into it' if whole else none}"


def check_files(asked: Asked, index: Index | None = None) -> tuple[str, ...]:
    """Name the first broken file of the checkpoint that a run would load.

    Args:
        asked: where the run looks; what is no path is not looked at.
        index: index of the checkpoint, if the caller has read it.

    Returns:
        A line ``value; rule; way out``; none where all files are there and as long as they must be.
    """
    if (found := asked.resolve()) is None:
        return ()
    if not found.checkpoint.is_dir():
        is_step = asked.step and found.name == str(asked.step)
        problem = f"{found.checkpoint} is missing; {'--ckpt-step' if is_step else TRACKER} names it"
    elif (broken := broken_file(found.checkpoint, index)) is not None:
        problem = f"{broken}; without it this checkpoint cannot be loaded"
    else:
        return ()
    return (f"{problem}; {way_out(found.checkpoint, asked)}",)


def way_out(checkpoint: Path, asked: Asked | None = None) -> str:
    """Say what to do about a checkpoint that cannot be loaded.

    Args:
        checkpoint: its folder.
        asked: where the run looks that would load it; None where only its folder is known.
    """
    found = None if asked is None else asked.resolve()
    if asked is None or found is None or found.checkpoint != checkpoint:
        found = Found(checkpoint.parent, checkpoint.name.removeprefix("iter_").lstrip("0"))
        asked = Asked(load_dir=str(found.folder))
    others = [
        other
        for folder, is_persistent in dict.fromkeys((*asked.folders, *asked.chosen_from().folders))
        for number in iterations(folder, is_whole=True)
        if (other := Found(folder, str(number), is_persistent)).checkpoint != checkpoint
    ]
    # The newest of the older ones first; a release has no place among them.
    is_after = {other: found.name != RELEASE and other.rank > found.rank for other in others}
    for other in sorted(others, key=lambda other: (not is_after[other], other.rank), reverse=True):
        if (way := _way_to(other, asked, checkpoint)) is not None:
            return f"copy it again, or load {'another' if is_after[other] else 'an older'} one with {way}"
    return "copy it again, or load another folder"


def _way_to(other: Found, asked: Asked, broken: Path) -> str | None:
    """Name the flag with which a run loads another checkpoint than a broken one, or None."""
    if replace(asked, step=int(other.name)).resolve() == other:
        return f"--ckpt-step {other.name}"
    others = (each for each in asked.chosen_from().candidates() if each.checkpoint != broken)
    whole = (each for each in others if broken_file(each.checkpoint) is None)
    if next(whole, None) != other:
        return None
    return f"--vtp-load-newest-valid{'' if asked.step is None else f', without --ckpt-step {asked.step}'}"


def find_checkpoint(folder: Path, *, takes_any: bool = False) -> Path:
    """Return the checkpoint that a user means: the folder itself, or the newest one in it. None of its files is read.

    Args:
        folder: the folder that the user named.
        takes_any: whether one of the format ``torch`` is found, too.

    Raises:
        ConfigError: neither is there, or the file that names the newest one names none.
    """
    if any((folder / name).exists() for name in ("metadata.json", ".metadata", MANIFEST)):
        return folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; a checkpoint is one; give its path")
    if any(folder.glob("mp_rank_*")):
        return _readable(folder, takes_any)
    name = read_tracker(folder)
    if name is None:
        raise ConfigError(
            f"{folder} holds neither a checkpoint nor {TRACKER}; a checkpoint has a file .metadata; give a folder like "
            "iter_0000100, or the one that holds it"
        )
    refuse(check_trackers(Asked(load_dir=str(folder))))
    checkpoint = of_iteration(folder, name)
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is missing; {TRACKER} names it; copy it again, or give another folder")
    return _readable(checkpoint, takes_any)


def _readable(checkpoint: Path, takes_any: bool) -> Path:
    """Return a checkpoint, unless it has the format ``torch``, which only some of the tools take.

    Raises:
        ConfigError: it has.
    """
    if not takes_any and any(checkpoint.glob("mp_rank_*")):
        raise ConfigError(
            f"{checkpoint} has the format torch, one file for each rank; these tools read torch_dist; load it and save "
            "it with --ckpt-format torch_dist"
        )
    return checkpoint


@contextlib.contextmanager
def naming_broken_files(asked: Asked | None) -> Iterator[None]:
    """Run what loads a checkpoint; where it fails because of a broken file, raise an error that names the file.

    So a rank tells of a file that only it sees, such as in a copy on its machine.

    Args:
        asked: where the run looks; None where that is not known.

    Raises:
        ConfigError: instead of any other error, if a file is broken. Files are checked only after an error.
    """
    try:
        yield
    except VtpError:
        raise
    except BaseException as error:  # torch's CheckpointException is none of Exception, and Megatron leaves by exit()
        if (own_error := _own_error(error)) is not None:
            raise own_error from error
        problems = () if asked is None else check_files(asked)
        if not problems:
            raise
        raise ConfigError(problems[0]) from error


def _own_error(error: BaseException) -> VtpError | None:
    """Find the plugin's own error inside torch's, which contains the errors of all ranks."""
    failures: Any = getattr(error, "failures", None)
    found = (wrapped[0] for wrapped in failures.values()) if isinstance(failures, dict) else ()
    return next((each for each in found if isinstance(each, VtpError)), None)


def iterations(folder: Path, *, is_whole: bool = False) -> list[int]:
    """Give the iterations of the checkpoints in a folder, in order.

    Args:
        folder: the folder of the checkpoints.
        is_whole: whether only those count in which no file is missing or too short; files are hardly read for that.
    """
    return [
        number
        for number in numbers_in(folder)
        if not is_whole or broken_file(of_iteration(folder, str(number))) is None
    ]


def is_read_in_pieces(name: str) -> bool:
    """Tell whether ranks check a file of a checkpoint while they load it.

    >>> is_read_in_pieces("__0_0.distcp"), is_read_in_pieces("mp_rank_00/model_optim_rng.pt")
    (True, True)
    >>> is_read_in_pieces("metadata.json")
    False
    """
    return name.endswith(".distcp") or name.startswith("mp_rank_")


def broken_file(checkpoint: Path, index: Index | None = None) -> str | None:
    """Name the first broken file of a checkpoint, with what is wrong; None if there is none.

    Of files that are read in pieces only the length is looked at.

    Args:
        checkpoint: folder of the checkpoint.
        index: its index, if the caller has read it.
    """
    try:
        return broken_beside(checkpoint, load_manifest(checkpoint), index)
    except ConfigError as error:
        return str(error).partition(";")[0]


def broken_beside(checkpoint: Path, manifest: Manifest | None, index: Index | None = None) -> str | None:
    """Do as :func:`broken_file`, with the manifest that the caller has read, or without one."""
    if manifest is not None:
        shared = manifest.of_files([name for name in manifest.sizes if not is_read_in_pieces(name)])
        problems = (*problems_of_sizes(checkpoint, manifest), *problems_of_pieces(checkpoint, shared))
        if problems:
            return problems[0]
    if any(checkpoint.glob("mp_rank_*")):
        files = sorted(checkpoint.glob("mp_rank_*/*.pt"))
        return next((problem for file in files if (problem := _archive_problem(file))), None)
    if (problem := problem_of_config(checkpoint)) is not None:
        return problem
    file_of_index = checkpoint / INDEX
    try:
        lengths, has_common = stored_lengths(file_of_index) if index is None else index.lengths()
    except FileNotFoundError:
        return f"{file_of_index} is missing or cannot be read"
    except OSError as error:
        return f"{file_of_index} cannot be read ({error.strerror})"
    except PathError as error:
        return f"{file_of_index} names a file that it must not ({error})"
    except Exception:  # whatever a damaged pickle raises
        return f"{file_of_index} is damaged"
    for name, length in sorted(lengths.items()):
        file = checkpoint / name
        if (problem := problem_of(file)) is not None:
            return f"{file} {problem}"
        if (found := file.stat().st_size) < length:
            return f"{file} is cut off, with {found} of {length} bytes"
    return None if has_common else _archive_problem(checkpoint / COMMON_FILE)


def problem_of_config(checkpoint: Path) -> str | None:
    """Say what is wrong with the file that says in which format a checkpoint is, or None."""
    config = checkpoint / "metadata.json"
    try:
        read = read_json(config)
    except FileNotFoundError:
        return f"{config} is missing or cannot be read"
    except OSError as error:
        return f"{config} cannot be read ({error.strerror})"
    except ValueError:
        return f"{config} is damaged"
    return None if isinstance(read, dict) else f"{config} is damaged"


def format_of(checkpoint: Path) -> object:
    """Return the format that a checkpoint says it has; None if it does not say, or nobody can read it."""
    try:
        return read_json(checkpoint / "metadata.json").get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return None


def _archive_problem(file: Path) -> str | None:
    """Say what is wrong with a file of ``torch.save``, whose table of contents is its end."""
    if (problem := problem_of(file)) is not None:
        return f"{file} {problem}"
    return None if zipfile.is_zipfile(file) else f"{file} is cut off or damaged"
