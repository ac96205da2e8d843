"""The part of a checkpoint that one site keeps in a folder of its own, and the note beside it that says so.

The parts of one save have one digest. What a part lacks is at another site: whoever needs it merges the parts.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from vtp_plugin.checkpoint.format.index import Index
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box, intersect, volume
from vtp_plugin.util.text import own_command
from vtp_plugin.util.typed_json import read_text, read_typed

PART: Final = "vtp_part.json"
"""The name of the note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePart:
    """Which part of which save a folder holds.

    Attributes:
        site: the site that keeps it.
        sites: all sites of the run, that of rank 0 first.
        save: digest of the save, the same in all its parts.
    """

    site: str
    sites: tuple[str, ...]
    save: str

    def dump(self) -> str:
        """Write the note.

        >>> SitePart(site="edge", sites=("edge", "cloud"), save="5f").dump()
        '{"site": "edge", "sites": ["edge", "cloud"], "save": "5f"}'
        """
        return json.dumps(asdict(self))


def digest_of_save(run: str, iteration: str) -> str:
    """Return what all parts of a save have in common, and those of no other.

    Args:
        run: random name of this start of the run, which all ranks know.
        iteration: its name.

    >>> len(digest_of_save("ab", "20")), digest_of_save("ab", "20") == digest_of_save("ab", "10")
    (32, False)
    """
    return hashlib.sha256(f"{run} {iteration}".encode()).hexdigest()[:32]


def read_part(checkpoint: Path) -> SitePart | None:
    """Read which part a checkpoint is; None for a whole one.

    Raises:
        ConfigError: the note cannot be read.
    """
    try:
        return read_typed(SitePart, read_text(checkpoint / PART))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{checkpoint / PART} cannot be read ({error}); it says of which save this is a part; copy it again"
        ) from None


def save_of(checkpoint: Path) -> str:
    """Return the digest of the save of which a checkpoint is a part; empty for a whole one, or none."""
    part = read_part(checkpoint)
    return "" if part is None else part.save


def require_whole(checkpoint: Path) -> None:
    """Refuse a part where a whole checkpoint is needed.

    Raises:
        ConfigError: it is one.
    """
    if (part := read_part(checkpoint)) is not None:
        others = " and ".join(site for site in part.sites if site != part.site)
        raise ConfigError(
            f"{checkpoint} is the part of site {part.site}, without the tensors of {others}; give all of them: "
            f"{own_command()} checkpoint merge --from {checkpoint} DIR --to NEW, where both sites may be seen"
        )


def num_missing(index: Index, key: str, box: Box) -> int:
    """Return how many elements of a box of a tensor an index does not hold; all of them where it has no such tensor.

    >>> num_missing(Index(Path(), {}, {}), "a", ((0, 2), (0, 3)))
    6
    """
    tensor = index.tensors.get(key)
    held = () if tensor is None else (intersect(own, box) for own, _ in tensor.extents)
    return volume(box) - sum(volume(inner) for inner in held if inner is not None)
