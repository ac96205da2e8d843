"""The index of a checkpoint, its file ``.metadata``: where each part of each tensor lies. It is read without torch.

Torch's own reader loads this file as a pickle, which may run anything. Here only classes that such an index consists of
may be named, and none of them is imported.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.entries import Extent
from vtp_plugin.checkpoint.format.safe_pickle import ForbiddenError, PickledObject, load_safely
from vtp_plugin.checkpoint.format.untrusted import UntrustedError
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box
from vtp_plugin.util.untrusted_files import MAX_INDEX_BYTES, PathError, count, inside, read_bytes

INDEX: Final = ".metadata"
"""The name of the file."""
ORIGINAL: Final = "nd_reformulated_orig_global_shape"
"""Under this name it says what shape a tensor had before each block of it was made flat."""
_COPY = "copy the checkpoint again, or take another one"
_TORCH = "torch.distributed.checkpoint"
_PATHS: Final = ("pathlib", "pathlib._local")  # so it is called in Python 3.13 alone
_ALLOWED: Final = {
    *((f"{_TORCH}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{_TORCH}.metadata", f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"),
    *((f"{_TORCH}.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *((f"{_TORCH}.planner", name) for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")),
    *(("megatron.core.dist_checkpointing.strategies.torch", name) for name in ("MCoreMetadata", "MCoreSavePlan")),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in _PATHS for name in ("Path", "PosixPath", "PurePosixPath")),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("builtins", "__builtin__") for name in ("set", "slice")),
}
_DTYPES: Final = ("bfloat16", "bool", "complex", "float", "int", "uint")
_DTYPE: Final = re.compile(r"bool|bfloat16|complex\d+|float\d+(_e\d+m\d+\w*)?|u?int\d+")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: name of the elements' type, as torch calls it.
        shape: shape of the whole tensor.
        extents: the bytes of each part, by its box.
        flattened: shape that the tensor had before each block of it was made flat; None if it was not.
    """

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[tuple[Box, Extent], ...]
    flattened: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Index:
    """The index of a checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        tensors: the tensors by their keys.
        objects: the bytes of everything else, by key.
    """

    folder: Path
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, Extent]

    @property
    def num_bytes(self) -> int:
        """Bytes of everything in the files."""
        return sum(extent.length or 0 for _, extent in self.extents())

    def extents(self) -> Iterator[tuple[str, Extent]]:
        """Yield the bytes of every tensor part and object, with its key."""
        for key, tensor in self.tensors.items():
            yield from ((key, extent) for _, extent in tensor.extents)
        yield from self.objects.items()

    def lengths(self) -> tuple[dict[str, int], bool]:
        """Return how long each file must be at least, and whether the values that all ranks share are in them."""
        lengths: defaultdict[str, int] = defaultdict(int)
        for _, extent in self.extents():
            lengths[extent.file] = max(lengths[extent.file], extent.offset + (extent.length or 0))
        return lengths, any(key.startswith("common_state") for key in self.objects)


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises:
        ConfigError: it is missing or damaged, or names what it must not.
    """
    read = read_named(folder / INDEX)
    try:
        return _index(folder, read.state)
    except ConfigError:
        raise
    except PathError as error:
        raise _damaged(folder / INDEX, f"names a file that it must not ({error})") from None
    except Exception as error:  # whatever damaged values make of their reader
        raise _damaged(folder / INDEX, f"is damaged ({error})") from None


def read_named(file: Path) -> Any:
    """Read an index as objects; only classes that an index consists of may be named in it.

    Raises:
        UntrustedError: it names what it must not.
        ConfigError: it is missing or damaged.
    """
    try:
        return load_safely(read_bytes(file, MAX_INDEX_BYTES), _is_allowed)
    except FileNotFoundError:
        raise _damaged(file, "is missing or cannot be read") from None
    except OSError as error:
        raise _damaged(file, f"cannot be read ({error.strerror})") from None
    except ForbiddenError as error:
        raise UntrustedError(
            f"{file} names {error.name}, which no index of a checkpoint needs; a pickle can run anything, so this one "
            "is not read; take a checkpoint whose origin you know"
        ) from None
    except Exception as error:  # whatever a damaged pickle raises
        raise _damaged(file, f"is damaged ({error})") from None


def _damaged(file: Path, problem: str) -> ConfigError:
    return ConfigError(f"{file} {problem}; it says where every tensor lies; {_COPY}")


def stored_lengths(file: Path) -> tuple[dict[str, int], bool]:
    """Read what :meth:`Index.lengths` says, of any index.

    Classes are not imported here, so the index may name any, and nothing that torch would read is refused.

    Args:
        file: the index.

    Raises:
        OSError: it cannot be read.
        Exception: of any kind; it is damaged.
    """
    stored: Mapping[PickledObject, PickledObject] = load_safely(read_bytes(file, MAX_INDEX_BYTES)).state["storage_data"]
    lengths: defaultdict[str, int] = defaultdict(int)
    for place in (each.state for each in stored.values()):
        end = count(place["offset"]) + count(place["length"])
        lengths[place["relative_path"]] = max(lengths[place["relative_path"]], end)
    for name in lengths:
        inside(file.parent, name)
    return lengths, any(_key(key.state["fqn"]).startswith("common_state") for key in stored)


def _is_allowed(module: str, name: str) -> bool:
    return (module, name) in _ALLOWED or (module == "torch" and name.startswith(_DTYPES))


def _index(folder: Path, state: Mapping[str, Any]) -> Index:
    places = dict(_extents(folder, state["storage_data"]))
    flattened = state.get("mcore_data") or {}
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, Extent] = {}
    for key, entry in state["state_dict_metadata"].items():
        if entry.origin[1] == "BytesStorageMetadata":
            objects[_key(key)] = places[key, None]
            continue
        shape = _size(entry.state["size"])
        boxes = [_box(each.state, len(shape)) for each in entry.state["chunks"]]
        extents = tuple((box, places[key, tuple(start for start, _ in box)]) for box in boxes)
        whole = (flattened.get(key) or {}).get(ORIGINAL)
        dtype = entry.state["properties"].state[0].origin[1]
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"{dtype} is no type of elements")
        tensors[_key(key)] = StoredTensor(dtype, shape, extents, whole and _original(_size(whole), shape))
    return Index(folder, tensors, objects)


def _extents(folder: Path, stored: Mapping[PickledObject, PickledObject]) -> Iterator[tuple[tuple[str, Any], Extent]]:
    known: set[str] = set()
    for key, place in stored.items():
        file = place.state["relative_path"]
        if file not in known:
            inside(folder, file)
            known.add(file)
        if place.state.get("transform_descriptors"):
            raise ConfigError(
                f"{folder / file} is compressed; these tools read tensors as they are; save it without transforms"
            )
        offset = key.state.get("offset")
        extent = Extent(file, count(place.state["offset"]), count(place.state["length"]))
        yield (_key(key.state["fqn"]), None if offset is None else _size(offset)), extent


def _key(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{ascii(value)[:100] if isinstance(value, str) else type(value).__name__} is no name")
    return value


def _box(state: Mapping[str, Any], num_dimensions: int) -> Box:
    offsets, sizes = _size(state["offsets"]), _size(state["sizes"])
    if len(offsets) != num_dimensions:
        raise ValueError("a part has other dimensions than its tensor")
    return tuple((start, start + length) for start, length in zip(offsets, sizes, strict=True))


def _size(value: Any) -> tuple[int, ...]:
    """Read a size of torch's, or a tuple in its place."""
    size = tuple(map(count, value.args[0] if isinstance(value, PickledObject) else value))
    count(math.prod(size))
    return size


def _original(whole: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Check the shape that a tensor had before each block of it was made flat."""
    *grid, last = shape
    blocks = [length // number for length, number in zip(whole, grid, strict=True)]
    if any(length % number for length, number in zip(whole, grid, strict=True)) or math.prod(blocks) != last:
        raise ValueError(f"no blocks of {whole} lie flat in {shape}")
    return whole
