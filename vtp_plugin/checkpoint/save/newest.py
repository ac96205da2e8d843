"""Whether a checkpoint is good: all of its bytes are read for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.archive import load_object
from vtp_plugin.checkpoint.format.checkpoint_files import broken_beside, is_read_in_pieces
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.entries import DamagedError, Extent
from vtp_plugin.checkpoint.format.manifest import MANIFEST, Manifest, load_manifest, problems_of_pieces
from vtp_plugin.errors import ConfigError

HAS_MANIFEST: Final = "vtp_has_manifest"
"""Megatron's argument that is stored with a checkpoint if there is a manifest beside it."""


def problem_of(
    checkpoint: Path, share: Callable[[Manifest], Callable[[str], bool]] = lambda _: lambda _: True
) -> str | None:
    """Say what is wrong with a checkpoint, or None; all pieces of some of its files are read.

    Args:
        checkpoint: folder of the checkpoint.
        share: called with the manifest, gives a function that tells by name whether a file that is read in pieces is
            read here.
    """
    if not checkpoint.is_dir():
        return f"{checkpoint} is missing"
    try:
        manifest = load_manifest(checkpoint)
    except ConfigError as error:
        return str(error).partition(";")[0]
    if (problem := broken_beside(checkpoint, manifest)) is not None:
        return problem
    if manifest is None:
        return problem_without_manifest(checkpoint, arguments_of(checkpoint))
    own = share(manifest)
    pieces = manifest.of_files([name for name in manifest.sizes if is_read_in_pieces(name) and own(name)])
    return next(iter(problems_of_pieces(checkpoint, pieces)), None)


def problem_without_manifest(checkpoint: Path, stored: Mapping[str, Any]) -> str | None:
    """Say that a manifest is missing, if the arguments that are stored with a checkpoint say that there is one."""
    if not stored.get(HAS_MANIFEST) or (checkpoint / MANIFEST).exists():
        return None
    return f"{checkpoint / MANIFEST} is missing, with which this checkpoint was saved"


def arguments_of(checkpoint: Path) -> Mapping[str, Any]:
    """Read the arguments of the run that saved a checkpoint; empty where they are not stored, or cannot be read."""
    try:
        first = min(checkpoint.glob("mp_rank_*/model_optim_rng.pt"), default=None)
        if first is None:
            return Contents(checkpoint).arguments
        stored = load_object(first.parent, Extent(first.name))
        return getattr(stored["args"], "state", None) or {}
    except (ConfigError, DamagedError, LookupError, TypeError):
        return {}


def share_out(manifest: Manifest, rank: int, world_size: int) -> Callable[[str], bool]:
    """Share the files of a checkpoint out among the ranks, so that each reads about as many bytes.

    >>> manifest = Manifest({"a": 5, "b": 3, "c": 1}, {})
    >>> [[name for name in "abc" if share_out(manifest, rank, 2)(name)] for rank in range(2)]
    [['a'], ['b', 'c']]
    """
    loads = [0] * world_size
    own: set[str] = set()
    for name, size in sorted(manifest.sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == rank:
            own.add(name)
    return own.__contains__
