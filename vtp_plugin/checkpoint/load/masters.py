"""Proves an inferred map: where it says that a parameter lies, the parameter's master weight must be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from vtp_plugin.checkpoint.format.common_parts import pairs
from vtp_plugin.checkpoint.format.contents import MASTER, Contents, Part, no_map
from vtp_plugin.checkpoint.format.optimizer_formats import IN_BUCKETS
from vtp_plugin.checkpoint.load.elements import Elements, slabs, typed
from vtp_plugin.util.index_boxes import Box, format_box


def require_masters(contents: Contents, share: int = 0, num_shares: int = 1) -> None:
    """Refuse an inferred map unless every master weight, rounded, equals its weight to the last bit.

    Args:
        contents: a checkpoint; one that has its map needs no proof.
        share: number of this process's share of the proof, where several processes divide it.
        num_shares: number of processes that divide the proof.

    Raises:
        ConfigError: the first parameter that does not fit is named.
    """
    if contents.form not in IN_BUCKETS or contents.has_map:
        return
    masters, weights = Elements(contents.folder), Elements(contents.folder)
    own = itertools.islice(_slabs(contents), share, None, num_shares)
    for name, of_master, of_weight, box in own:
        dtypes = masters.dtype(of_master), weights.dtype(of_weight)
        rounded = typed(masters.read(of_master, box), dtypes[0]).to(getattr(torch, dtypes[1]))
        if not torch.equal(rounded.view(torch.uint8), weights.read(of_weight, box)):
            raise no_map(contents.folder, f"{name} at {format_box(box)} is not its master weight, rounded")


def _slabs(contents: Contents) -> Iterator[tuple[str, Part, Part, Box]]:
    """Yield what to compare, always in the same order."""
    weights = contents.weights()
    for (state, name), master in contents.states().items():
        if state != MASTER:
            continue
        common, problem = pairs(master, weights[name])
        if problem is not None:
            raise no_map(contents.folder, f"master weights and weights of {name} cannot be compared: {problem}")
        for of_master, of_weight, box in common:
            yield from ((name, of_master, of_weight, inner) for inner in slabs(box, "float32"))
