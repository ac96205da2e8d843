"""Checks that a map of the distributed optimizer's buckets fits a checkpoint, and what a run reads from it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from vtp_plugin.checkpoint.format.fill import Stored
from vtp_plugin.checkpoint.format.shard_map import Bucket, ShardSpec, StoredRange
from vtp_plugin.errors import PlanError
from vtp_plugin.util.index_boxes import Box, overlaps, volume

_WRONG_MAP = "the map does not belong to this checkpoint; load only the weights with --no-load-optim"
_OTHER_MODEL = "another model, or another padded vocabulary, was saved; start with its options"
_NOT_TRAINED = (
    "it was not trained then; start with the options of that run, or load only the weights with --no-load-optim"
)


def check_map(
    file: str, buckets: Sequence[Bucket], pieces: Iterable[StoredRange], *, is_joined: bool = False
) -> Iterator[str]:
    """Say where a map contradicts the stored pieces, or itself.

    Args:
        file: name of the file that holds the map.
        buckets: the buckets of the map.
        pieces: the stored pieces of all buckets.
        is_joined: whether a piece holds several parameters.

    Yields:
        Lines ``value; rule; way out``.

    >>> list(check_map("map.json", [Bucket("0", 6, ())], [StoredRange("0", 0, 4), StoredRange("0", 4, 1)]))
    ... # doctest: +ELLIPSIS
    ['map.json: 0 has 6 elements, and 5 are stored; the map does not belong to this checkpoint; ...']
    """
    stored: defaultdict[str, list[StoredRange]] = defaultdict(list)
    for piece in pieces:
        stored[piece.key].append(piece)
    for bucket in buckets:
        if (problem := _problem_of_bucket(bucket, stored.pop(bucket.key, []), is_joined)) is not None:
            yield f"{file}: {problem}; {_WRONG_MAP}"
            return
    if stored:
        yield f"{file}: {next(iter(stored))} is stored and not in it; {_WRONG_MAP}"
    elif (problem := _problem_of_shards(buckets)) is not None:
        yield f"{file}: {problem}; {_WRONG_MAP}"


def _problem_of_bucket(bucket: Bucket, pieces: list[StoredRange], is_joined: bool) -> str | None:
    """Name the first position where pieces leave a gap, overlap, or do not begin and end with a parameter."""
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset != end:
            return f"{bucket.key} is stored with a gap or twice at element {min(end, piece.offset)}"
        end += piece.numel
    if end != bucket.numel:
        return f"{bucket.key} has {bucket.numel} elements, and {end} are stored"
    ends = {0, *(piece.offset + piece.numel for piece in pieces)}
    behind = 0
    for part in bucket.parts:
        first, last = part.offset, part.offset + part.shard.numel
        if first < behind or (last > end if is_joined else not {first, last} <= ends):
            return f"{part.shard.name} would lie at {first}:{last} of {bucket.key}, where no stored parameter lies"
        behind = last
    return None


def _problem_of_shards(buckets: Iterable[Bucket]) -> str | None:
    """Name the first parameter that the ranks together do not hold exactly once."""
    boxes: defaultdict[tuple[str, tuple[int, ...]], list[Box]] = defaultdict(list)
    for shard in (part.shard for bucket in buckets for part in bucket.parts):
        try:
            shard.require_orderly()
        except (PlanError, ValueError):
            return f"{shard.name} is cut in no order"
        # What only copies hold nobody holds.
        boxes[shard.name, shard.shape] += [] if shard.is_copy else [block.box for block in shard.blocks]
    if len(boxes) != len({name for name, _ in boxes}):
        return "one parameter has two shapes"
    for (name, shape), held in boxes.items():
        if sum(map(volume, held)) != math.prod(shape) or next(overlaps(held), None) is not None:
            return f"the ranks do not hold {name} {shape} once"
    return None


def check_wanted(where: str, stored: Stored, shards: Iterable[ShardSpec]) -> Iterator[str]:
    """Name the first parameter of a run that the checkpoint does not store with the same shape.

    Args:
        where: the checkpoint, for the text.
        stored: what it holds.
        shards: the parts of parameters that a rank reads.

    Yields:
        The first line ``value; rule; way out``.
    """
    for shard in shards:
        found = stored.shape_of(shard.name)
        if found == shard.shape:
            continue
        if found is None:
            yield f"{where}: the optimizer's {shard.name} is not stored, and this run trains it; {_NOT_TRAINED}"
        else:
            shown = f"has the shape {found}, and this run's has {shard.shape}"
            yield f"{where}: the optimizer's {shard.name} {shown}; {_OTHER_MODEL}"
        return
