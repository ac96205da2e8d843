"""Where each piece of a checkpoint lies, and its hash.

A hash over bytes of a file: of all of it, or of a part. Its text begins with the name of its algorithm.

xxHash (XXH3, 128 bits) is several times faster than a disk, so it does not slow a save down; the package ``xxhash`` has
it. Where that is missing, the sum CRC-32 of the standard library takes its place. Both find every single flipped bit;
neither is meant against somebody who changes a file on purpose.

The manifest of a checkpoint: a file with the length of every other file, and the hash of each stored piece.

It is two lines: an object of JSON, and the hash of that line, so that damage of this file is not taken for damage of
another one. Its name does not begin with a dot: what copies a checkpoint by a pattern should take it along.

The index of a checkpoint, its file ``.metadata``: where each part of each tensor lies. It is read without torch.

Torch's own reader loads this file as a pickle, which may run anything. Here only classes that such an index consists of
may be named, and none of them is imported.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import struct
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO, Any, Final, Protocol

from vtp_plugin.checkpoint.format.safe_pickle import ForbiddenError, PickledObject, load_safely
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box
from vtp_plugin.util.typed_json import (
    MAX_INDEX_BYTES,
    PathError,
    count,
    inside,
    open_file,
    parse_json,
    problem_of,
    read_bytes,
    read_text,
)


class UntrustedError(ConfigError):
    """A file of a checkpoint names what only somebody who means harm would put there."""


def names_more(archive: str, name: str) -> UntrustedError:
    """Make the error that an archive names something that torch does not consider safe.

    Args:
        archive: the archive's name in the error.
        name: name of the function or class.
    """
    return UntrustedError(
        f"{archive} names {name}, which torch does not take for harmless; it may run anything, so nothing is read; "
        "take a checkpoint whose origin you know, or allow what you trust with torch.serialization.add_safe_globals"
    )


def is_unknown(archive: str, error: Exception) -> UntrustedError:
    """Make the error that nobody can tell what an archive names.

    Args:
        archive: the archive's name in the error.
        error: the error of torch's reader.
    """
    reason = ascii(str(error))[1:100]
    return UntrustedError(
        f"{archive} is not what torch.save writes ({reason}), so nobody can tell what it names; nothing is read; "
        "copy it again, or take a checkpoint whose origin you know"
    )


def refused(archive: str, error: Exception) -> UntrustedError:
    """Make the error for an object that torch has refused to make.

    >>> str(refused("a.pt", ValueError("Unsupported global: GLOBAL posix.system was not"))).partition(",")[0]
    'a.pt names posix.system'
    """
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return names_more(archive, found.group(1)) if found else is_unknown(archive, error)


_LOCAL_HEADER: Final = struct.Struct("<26xHH")


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes of a file that belong together.

    Attributes:
        file: name of the file in the checkpoint.
        offset: offset of the first byte in the file.
        length: number of bytes; None for all of the file.
        path: keys that lead to a tensor inside the object that is stored there; empty where the bytes are the tensor.
    """

    file: str
    offset: int = 0
    length: int | None = None
    path: tuple[str, ...] = ()


class DamagedError(Exception):
    """An archive cannot be read; the text says why."""


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader[io.FileIO], extent: Extent) -> None:
        self._file, self._start, self._at = file, extent.offset, 0
        size = os.fstat(file.fileno()).st_size
        self._length = size - extent.offset if extent.length is None else extent.length
        if size < extent.offset + self._length:
            raise DamagedError(f"is cut off, with {size} of {extent.offset + self._length} bytes")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence])
        return self._at

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


@contextmanager
def opened(folder: Path, extent: Extent) -> Iterator[zipfile.ZipFile]:
    """Open an archive; whatever a damaged one makes the reader raise is one error."""
    try:
        with (
            io.BufferedReader(open_file(folder / extent.file)) as file,
            zipfile.ZipFile(_Slice(file, extent)) as archive,
        ):
            _require_stored(archive, extent)
            yield archive
    except DamagedError:
        raise
    except FileNotFoundError:
        raise DamagedError("is missing") from None
    except OSError as error:
        raise DamagedError(f"cannot be read ({error.strerror or error})") from None
    except Exception as error:  # pickles and archives raise what they like
        raise DamagedError(f"is damaged at byte {extent.offset} ({error})") from None


def read_extent(folder: Path, extent: Extent) -> bytes:
    """Read bytes of a file; those behind its end are left out.

    Raises:
        OSError: it cannot be read.
    """
    with open_file(folder / extent.file) as file:
        file.seek(extent.offset)
        return file.read(-1 if extent.length is None else min(extent.length, os.fstat(file.fileno()).st_size))


def _require_stored(archive: zipfile.ZipFile, extent: Extent) -> None:
    """Refuse what torch does not write, and what would be larger in memory than in the file.

    Raises:
        DamagedError: entries are compressed, lie in each other's bytes, or have one name.
    """
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DamagedError(f"is compressed at byte {extent.offset}")
    if len(archive.NameToInfo) != len(entries):
        raise DamagedError(f"has two entries of one name at byte {extent.offset}")
    if sum(max(entry.file_size, entry.compress_size) for entry in entries) > _file_of(archive).seek(0, os.SEEK_END):
        raise DamagedError(f"says that it holds more bytes than it has at byte {extent.offset}")


def entry_name(archive: zipfile.ZipFile, name: str) -> str:
    """Return the name of an entry with the folder that all entries of an archive lie in."""
    top = archive.namelist()[0].partition("/")[0]
    return f"{top}/{name}"


def place_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, offset: int, length: int) -> int:
    """Return where bytes of an entry lie in the archive, behind the entry's header, whose length only that header has.

    Args:
        archive: the archive.
        entry: an entry of the archive.
        offset: offset of the first byte in the entry.
        length: number of bytes.

    Raises:
        DamagedError: there are fewer.
    """
    file = _file_of(archive)
    file.seek(entry.header_offset)
    name, extra = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    place = entry.header_offset + _LOCAL_HEADER.size + name + extra + offset
    if offset + length > entry.file_size or place + length > file.seek(0, os.SEEK_END):
        raise DamagedError("holds fewer elements than its shape says")
    return place


def bytes_of(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, offset: int, length: int) -> bytes:
    """Read bytes of an entry, and no others.

    Raises:
        DamagedError: there are fewer.
    """
    file = _file_of(archive)
    file.seek(place_of(archive, entry, offset, length))
    return file.read(length)


def _file_of(archive: zipfile.ZipFile) -> IO[bytes]:
    assert archive.fp is not None
    return archive.fp


def write_archive(entries: Mapping[str, bytes]) -> bytes:
    """Make an archive of entries, as ``torch.load`` reads it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without the time, so that it is the same each time
    return file.getvalue()


try:
    import xxhash
except ImportError:  # an image of a vendor, to which nothing was added
    xxhash = None

_READ_BYTES: Final = 1 << 20


class Digest(Protocol):
    """Takes bytes, one part after another."""

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Return the hash of what was taken so far, in hexadecimal digits."""
        ...


class Crc32:
    """The sum that zip files have.

    >>> digest = Crc32()
    >>> digest.update(b"123456789")
    >>> digest.hexdigest()
    'cbf43926'
    """

    def __init__(self) -> None:
        self._sum = 0

    def update(self, data: Any, /) -> None:
        """Take the next bytes."""
        self._sum = zlib.crc32(data, self._sum)

    def hexdigest(self) -> str:
        """Return the sum."""
        return f"{self._sum:08x}"


ALGORITHMS: Final[dict[str, Callable[[], Digest]]] = {
    **({} if xxhash is None else {"xxh3_128": xxhash.xxh3_128}),
    "crc32": Crc32,
}
"""What this process can compute, the best first."""


class Hashing:
    """Makes a hash, whose text names its algorithm.

    Args:
        algorithm: name of the algorithm in :data:`ALGORITHMS`; the best one if it is left out.

    >>> hashing = Hashing("crc32")
    >>> hashing.update(b"123456789")
    >>> str(hashing)
    'crc32:cbf43926'
    """

    def __init__(self, algorithm: str | None = None) -> None:
        self._algorithm = algorithm or next(iter(ALGORITHMS))
        self._digest = ALGORITHMS[self._algorithm]()
        self.update = self._digest.update

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._digest.hexdigest()}"


def algorithm_of(digest: str) -> str:
    """Return the name of the algorithm that made a hash.

    >>> algorithm_of("crc32:cbf43926")
    'crc32'
    """
    return digest.partition(":")[0]


def digest_of(
    folder: Path, extent: Extent, algorithm: str | None = None, on_read: Callable[[int], None] = lambda _: None
) -> str:
    """Read bytes of a file and return their hash.

    Args:
        folder: folder of the checkpoint.
        extent: the file in it, and which of its bytes; those behind its end are left out.
        algorithm: name of the algorithm in :data:`ALGORITHMS`; the best one if it is left out.
        on_read: called with a number of bytes, whenever so many more have been read.

    Raises:
        OSError: the file cannot be read.
    """
    hashing = Hashing(algorithm)
    with open_file(folder / extent.file) as file:
        hash_bytes(hashing, file, extent.offset, extent.length, on_read)
    return str(hashing)


def hash_bytes(
    hashing: Hashing, file: FileIO, offset: int, length: int | None, on_read: Callable[[int], None] = lambda _: None
) -> None:
    """Read bytes of a file into a hash.

    Args:
        hashing: the hash that takes the bytes.
        file: the file.
        offset: offset of the first byte in the file.
        length: number of bytes; None for all that follow. Those behind the file's end are left out.
        on_read: called with a number of bytes, whenever so many more have been read.

    Raises:
        OSError: the file cannot be read.
    """
    buffer, left = memoryview(bytearray(_READ_BYTES if length is None else min(length, _READ_BYTES))), length
    file.seek(offset)
    while left is None or left > 0:
        count = file.readinto(buffer if left is None else buffer[:left])
        if not count:
            break
        hashing.update(buffer[:count])
        on_read(count)
        left = None if left is None else left - count


MANIFEST: Final = "vtp_manifest.json"
"""The name of the file."""
_VERSION = 1
_COPY_OF_MANIFEST = "copy the checkpoint again, or take another one"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint must hold.

    Attributes:
        sizes: bytes of every file, by its path in the folder.
        digests: hash of every piece; the pieces of a file together are all of its bytes.
    """

    sizes: Mapping[str, int]
    digests: Mapping[Extent, str]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(self.sizes.values())

    @property
    def can_check(self) -> bool:
        """Whether this process can make such hashes."""
        return {algorithm_of(digest) for digest in self.digests.values()} <= ALGORITHMS.keys()

    def of_files(self, names: Collection[str]) -> Manifest:
        """Return a manifest of some of the files."""
        return Manifest(
            {name: size for name, size in self.sizes.items() if name in names},
            {extent: digest for extent, digest in self.digests.items() if extent.file in names},
        )


def dump_manifest(manifest: Manifest) -> str:
    r"""Write a manifest.

    >>> manifest = Manifest({"a": 3}, {Extent("a", 0, 3): "crc32:00c0ffee"})
    >>> dump_manifest(manifest).split("\n")[0]
    '{"version":1,"files":{"a":[3,[[0,3,"crc32:00c0ffee"]]]}}'
    """
    pieces: defaultdict[str, list[tuple[int, int | None, str]]] = defaultdict(list)
    for extent, digest in manifest.digests.items():
        pieces[extent.file].append((extent.offset, extent.length, digest))
    files = {name: (size, sorted(pieces[name])) for name, size in sorted(manifest.sizes.items())}
    text = json.dumps({"version": _VERSION, "files": files}, separators=(",", ":"))
    return f"{text}\n{_sum(text)}\n"


def load_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a checkpoint; None if it has none, as one that an older version or stock Megatron saved.

    Raises:
        ConfigError: it is damaged, or a newer version of the plugin wrote it.
    """
    file = folder / MANIFEST
    try:
        text, digest, *rest = read_text(file, MAX_INDEX_BYTES).split("\n")
        read = parse_json(text)
        version, algorithm = int(read["version"]), algorithm_of(digest)
        if rest != [""] or (algorithm in ALGORITHMS and _sum(text, algorithm) != digest):
            raise ValueError
        if version == _VERSION:
            return _manifest(folder, read)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); it has the hashes of all other files; {_COPY_OF_MANIFEST}"
        ) from None
    except PathError as error:
        raise ConfigError(f"{file} names a file that it must not ({error}); {_COPY_OF_MANIFEST}") from None
    except (ValueError, TypeError, LookupError, AttributeError):  # whatever a damaged file makes of its reader
        raise ConfigError(f"{file} is damaged; it has the hashes of all other files; {_COPY_OF_MANIFEST}") from None
    raise ConfigError(
        f"{file} is a manifest of version {version}, and this vtp_plugin reads version {_VERSION}; use the one that "
        "wrote it"
    )


def make_manifest(folder: Path, known: Mapping[Extent, str] | None = None) -> Manifest:
    """Make the manifest of what lies in a folder.

    Args:
        folder: folder of the checkpoint.
        known: hashes that were made while writing; pieces that are not among them are read.

    Raises:
        ConfigError: a file is not as long as what was written into it.
    """
    known = known or {}
    ends: defaultdict[str, int] = defaultdict(int)
    for extent in known:
        ends[extent.file] += extent.length or 0
    digests = dict(known)
    sizes = {name: (folder / name).stat().st_size for name in sorted({*files_of(folder), *ends})}
    for name, size in sizes.items():
        if name not in ends:
            digests[Extent(name, 0, size)] = digest_of(folder, Extent(name, 0, size))
        elif ends[name] != size:
            raise ConfigError(
                f"{folder / name} has {size} bytes, and {ends[name]} were written; a checkpoint must hold what was "
                "written; look at the disk"
            )
    return Manifest(sizes, digests)


def files_of(folder: Path) -> Iterator[str]:
    """Yield the paths, in a folder, of its files, without the manifest."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file != folder / MANIFEST:
            yield str(file.relative_to(folder))


def problems_of_sizes(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Say which files are missing or have another length; nothing is read.

    Yields:
        Texts that begin with the file.
    """
    for name, size in manifest.sizes.items():
        if (problem := _problem_of_size(folder / name, size)) is not None:
            yield f"{folder / name} {problem}"


def _problem_of_size(file: Path, size: int) -> str | None:
    if (problem := problem_of(file)) is not None:
        return problem
    found = file.stat().st_size
    if found == size:
        return None
    return f"{'is cut off' if found < size else 'has grown'}, with {found} of {size} bytes"


def problems_of_pieces(
    folder: Path, manifest: Manifest, on_read: Callable[[int], None] = lambda _: None
) -> Iterator[str]:
    """Read all pieces of a manifest, and say which have changed. Files of another length are left out.

    Args:
        folder: folder of the checkpoint.
        manifest: the manifest, or the part of it that is to be checked.
        on_read: called with a number of bytes, whenever so many more have been read.

    Yields:
        Texts that begin with the file.
    """
    if not manifest.can_check:
        return
    whole = {name for name, size in manifest.sizes.items() if _problem_of_size(folder / name, size) is None}
    for extent in sorted(manifest.digests, key=lambda extent: (extent.file, extent.offset)):
        if extent.file in whole:
            yield from problem_of_piece(folder, manifest, extent, on_read)


def problem_of_piece(
    folder: Path, manifest: Manifest, extent: Extent, on_read: Callable[[int], None] = lambda _: None
) -> Iterable[str]:
    """Read a piece, and say if it has changed: in no or one text that begins with the file."""
    wanted = manifest.digests[extent]
    return problem_unless(folder, extent, wanted, lambda: digest_of(folder, extent, algorithm_of(wanted), on_read))


def problem_unless(folder: Path, extent: Extent, wanted: str, find: Callable[[], str]) -> Iterable[str]:
    """Say that a piece has changed, unless the hash that is found is the one that is wanted."""
    try:
        is_same = find() == wanted
    except OSError as error:
        return (f"{folder / extent.file} cannot be read ({error.strerror})",)
    end = extent.offset + (extent.length or 0)
    return () if is_same else (f"{folder / extent.file} is damaged between bytes {extent.offset} and {end}",)


def _manifest(folder: Path, read: Mapping[str, Any]) -> Manifest:
    sizes: dict[str, int] = {}
    digests: dict[Extent, str] = {}
    for name, (size, pieces) in read["files"].items():
        inside(folder, name)
        sizes[name] = count(size)
        own = {Extent(name, count(offset), count(length)): digest for offset, length, digest in pieces}
        if any(extent.offset + (extent.length or 0) > size for extent in own) or not all(map(_is_text, own.values())):
            raise ValueError("a piece that is none of its file")
        # Pieces that lie in each other would be read once for each.
        if sum(extent.length or 0 for extent in own) > size:
            raise ValueError("pieces that lie in each other")
        digests |= own
    return Manifest(sizes, digests)


def _is_text(digest: object) -> bool:
    return isinstance(digest, str) and digest.isprintable()


def _sum(text: str, algorithm: str | None = None) -> str:
    hashing = Hashing(algorithm)
    hashing.update(text.encode())
    return str(hashing)


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
