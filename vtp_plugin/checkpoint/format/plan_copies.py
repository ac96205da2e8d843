"""Plans the copies from stored pieces that fill what a rank of another layout needs, and proves them complete.

A worked example. A weight of 4 rows and 3 columns was stored by two tensor-parallel ranks, two rows each, each in a
bucket of its own, the second behind a bias of 2 elements. Two data-parallel ranks shared each bucket, so it lies in
pieces. A rank of a layout that splits columns needs the last two columns of the weight. It gets them by four copies;
each says how many elements it moves in every dimension:

>>> from vtp_plugin.checkpoint.format.shard_map import Block, ShardSpec, Strided
>>> def rows(start, stop):
...     return ShardSpec(name="w", shape=(4, 3), blocks=(Block(((start, stop), (0, 3)), Strided(0, (3, 1))),))
>>> bias = ShardSpec(name="b", shape=(2,), blocks=(Block(((0, 2),), Strided(0, (1,))),))
>>> buckets = [
...     Bucket("0", 6, (BucketEntry(rows(0, 2), 0),)),
...     Bucket("1", 8, (BucketEntry(bias, 0), BucketEntry(rows(2, 4), 2))),
... ]
>>> places = [("0", 0, 4), ("0", 4, 2), ("1", 0, 2), ("1", 2, 2), ("1", 4, 4)]
>>> pieces = [StoredRange(*place) for place in places]
>>> stored = Stored(buckets, pieces)
>>> columns = ShardSpec(name="w", shape=(4, 3), blocks=(Block(((0, 4), (1, 3)), Strided(0, (2, 1))),))
>>> for copy in stored.fill(columns, 0, 8):
...     print(copy.piece.key, copy.piece.offset, copy.shape, copy.source.offset, copy.target.offset)
0 0 (1, 2) 1 0
0 4 (1, 2) 0 2
1 2 (1, 1) 1 4
1 4 (1, 1) 0 5
1 4 (1, 2) 2 6
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vtp_plugin.checkpoint.format.shard_map import (
    Block,
    Bucket,
    BucketEntry,
    ShardSpec,
    StoredRange,
    Strided,
    boxes_between,
)
from vtp_plugin.errors import PlanError
from vtp_plugin.util.index_boxes import Box, box_shape, intersect, overlaps, volume, whole_box


@dataclass(frozen=True, slots=True)
class Copy:
    """A box of elements that is copied from one stored piece.

    Attributes:
        box: the box, in coordinates of the whole parameter.
        piece: the stored piece.
        source: where the elements lie in the piece.
        target: where they belong in the range that is filled.
    """

    box: Box
    piece: StoredRange
    source: Strided
    target: Strided

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of elements in every dimension."""
        return box_shape(self.box)


class Stored:
    """The stored optimizer of a checkpoint, by parameter.

    Args:
        buckets: all buckets of the checkpoint.
        pieces: all of the buckets, in any order; of every bucket they leave no gap
            (:func:`~vtp_plugin.checkpoint.format.infer_map.check_map`).

    Attributes:
        buckets: the buckets by their keys.
    """

    def __init__(self, buckets: Iterable[Bucket], pieces: Iterable[StoredRange]) -> None:
        self.buckets = {bucket.key: bucket for bucket in buckets}
        self._pieces: defaultdict[str, list[StoredRange]] = defaultdict(list)
        for piece in sorted(pieces, key=lambda piece: piece.offset):
            self._pieces[piece.key].append(piece)
        self._places: defaultdict[str, list[tuple[str, BucketEntry]]] = defaultdict(list)
        for bucket in self.buckets.values():
            for part in bucket.parts:
                if not part.shard.is_copy:
                    self._places[part.shard.name].append((bucket.key, part))

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a parameter; None if none is called so."""
        return self._places[name][0][1].shard.shape if name in self._places else None

    def fill(self, shard: ShardSpec, start: int, stop: int) -> tuple[Copy, ...]:
        """Plan the copies that fill a range of a rank's part of a parameter.

        Args:
            shard: the rank's part of the parameter.
            start: first element that is needed, in the order of the rank's memory.
            stop: the element behind the last one.

        Returns:
            Copies that together give every element once; proved.
        """
        copies = tuple(copy for block in shard.blocks for copy in self._fill_block(shard.name, block, start, stop))
        require_cover(shard, start, stop, copies)
        return copies

    def _fill_block(self, name: str, block: Block, start: int, stop: int) -> Iterator[Copy]:
        for key, part in self._places.get(name, ()):
            for source in part.shard.blocks:
                common = intersect(block.box, source.box)
                if common is None:
                    continue
                here = block.strided.at(common, block.box)
                there = source.strided.at(common, source.box).moved(part.offset)
                yield from self._cut_pieces(key, common, here, there, (start, stop))

    def _cut_pieces(self, key: str, box: Box, here: Strided, there: Strided, wanted: tuple[int, int]) -> Iterator[Copy]:
        """Yield a copy for each run of needed elements of a box that lies in one piece."""
        shape = box_shape(box)
        first, last = (count_below(here, shape, limit) for limit in wanted)
        pieces = self._pieces[key]
        index = max(bisect_right(pieces, there.offset, key=lambda piece: piece.offset) - 1, 0)
        while first < last and index < len(pieces):
            piece = pieces[index]
            end = min(last, count_below(there, shape, piece.offset + piece.numel))
            for inner in boxes_between(shape, first, end):
                whole = whole_box(shape)
                yield Copy(
                    box=tuple((a + start, b + start) for (a, b), (start, _) in zip(inner, box, strict=True)),
                    piece=piece,
                    source=there.at(inner, whole).moved(-piece.offset),
                    target=here.at(inner, whole).moved(-wanted[0]),
                )
            first, index = max(first, end), index + 1


def count_below(strided: Strided, shape: tuple[int, ...], limit: int) -> int:
    """Count the elements of a box that lie before a place in memory; they are its first ones.

    >>> [count_below(Strided(10, (4, 1)), (3, 2), limit) for limit in (10, 11, 12, 14, 15, 99)]
    [0, 1, 2, 2, 3, 6]
    """
    count, left = 0, limit - strided.offset
    reach = sum((length - 1) * stride for length, stride in zip(shape, strided.strides, strict=True))
    size = math.prod(shape)
    for length, stride in zip(shape, strided.strides, strict=True):
        size //= length
        reach -= (length - 1) * stride
        # Rows that lie before the limit with all they have; at most the next one has some elements there.
        rows = length * (left > reach) if stride == 0 else min(max((left - reach - 1) // stride + 1, 0), length)
        count += rows * size
        if rows == length:
            return count
        left -= rows * stride
    return count


def require_cover(shard: ShardSpec, start: int, stop: int, copies: tuple[Copy, ...]) -> None:
    """Prove that copies give every element of a range once, each from inside its piece.

    Raises:
        PlanError: they do not.
    """
    what = f"{start}:{stop} of {shard.name}"
    for copy in copies:
        spans = (
            (_span(copy.source, copy.shape), copy.piece.numel, "its piece"),
            (_span(copy.target, copy.shape), stop - start, "the range"),
        )
        for (first, last), numel, where in spans:
            if first < 0 or last >= numel:
                raise PlanError(f"a copy of {what} leaves {where}: {copy}")
        if not any(_puts(block, start, copy) for block in shard.blocks):
            raise PlanError(f"a copy of {what} puts elements where others belong: {copy}")
    if next(overlaps([copy.box for copy in copies]), None) is not None:
        raise PlanError(f"copies of {what} give an element twice")
    # What lies inside, and does not overlap, is all if it is as much.
    if (found := sum(volume(copy.box) for copy in copies)) != stop - start:
        raise PlanError(f"copies of {what} give {found} elements")


def _puts(block: Block, start: int, copy: Copy) -> bool:
    """Tell whether a copy puts a box where it lies in a block."""
    if intersect(copy.box, block.box) != copy.box:
        return False
    return block.strided.at(copy.box, block.box).moved(-start) == copy.target


def _span(strided: Strided, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first and the last element of a box in memory."""
    reach = sum((length - 1) * stride for length, stride in zip(shape, strided.strides, strict=True))
    return strided.offset, strided.offset + reach
