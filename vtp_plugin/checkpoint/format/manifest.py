"""The manifest of a checkpoint: a file with the length of every other file, and the hash of each stored piece.

It is two lines: an object of JSON, and the hash of that line, so that damage of this file is not taken for damage of
another one. Its name does not begin with a dot: what copies a checkpoint by a pattern should take it along.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.digest import ALGORITHMS, Hashing, algorithm_of, digest_of
from vtp_plugin.checkpoint.format.entries import Extent
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.untrusted_files import MAX_INDEX_BYTES, PathError, count, inside, parse_json, problem_of, read_text

MANIFEST: Final = "vtp_manifest.json"
"""The name of the file."""
_VERSION = 1
_COPY = "copy the checkpoint again, or take another one"


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
            f"{file} cannot be read ({error.strerror}); it has the hashes of all other files; {_COPY}"
        ) from None
    except PathError as error:
        raise ConfigError(f"{file} names a file that it must not ({error}); {_COPY}") from None
    except (ValueError, TypeError, LookupError, AttributeError):  # whatever a damaged file makes of its reader
        raise ConfigError(f"{file} is damaged; it has the hashes of all other files; {_COPY}") from None
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
