"""How a rank's parameter is cut out of the whole one, and where it lies in what the distributed optimizer stores.

The distributed optimizer lays the parameters of a rank one after another into buckets, and stores each bucket as one
flat tensor, in pieces: each data-parallel rank writes its share. A parameter of a rank is part of a larger one, which
all layouts name and number alike; its blocks say which part, and in which order it lies in the rank's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from vtp_plugin.errors import PlanError
from vtp_plugin.util.boxes import Box, box_shape


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return how far apart neighbours lie in memory, dimension by dimension, in a tensor without gaps.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(accumulate(shape[:0:-1], initial=1, func=lambda a, b: a * b))[::-1] if shape else ()


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements of a box lie in flat memory.

    Attributes:
        offset: of the first one.
        strides: how far apart neighbours are, dimension by dimension.
    """

    offset: int
    strides: tuple[int, ...]

    def at(self, inner: Box, outer: Box) -> Strided:
        """Return where a box inside the box that this is about lies.

        >>> Strided(10, (4, 1)).at(((3, 4), (1, 3)), ((2, 4), (0, 4)))
        Strided(offset=15, strides=(4, 1))
        """
        steps = (a[0] - b[0] for a, b in zip(inner, outer, strict=True))
        return Strided(
            self.offset + sum(step * stride for step, stride in zip(steps, self.strides, strict=True)), self.strides
        )

    def moved(self, by: int) -> Strided:
        """Return the same behind so many more elements."""
        return Strided(self.offset + by, self.strides)


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a whole parameter, and where its elements lie in the flat memory of a rank's part.

    Attributes:
        box: of the whole parameter.
        place: in the rank's memory.
    """

    box: Box
    place: Strided

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the box."""
        return box_shape(self.box)


def block_at(box: Box, offset: int, strides: tuple[int, ...]) -> Block:
    """Make a block from what a tensor says of its memory.

    Dimensions of length 1 get the stride of a tensor without gaps: theirs means nothing, and two blocks that hold the
    same are then equal.

    >>> block_at(((3, 4), (0, 2), (0, 3)), 6, (99, 3, 1))
    Block(box=((3, 4), (0, 2), (0, 3)), place=Strided(offset=6, strides=(6, 3, 1)))
    """
    said: list[int] = []
    reach = 1
    for (start, stop), stride in zip(reversed(box), reversed(strides), strict=True):
        said.append(reach if stop - start == 1 else stride)
        reach += (stop - start - 1) * said[-1]
    return Block(box, Strided(offset, tuple(reversed(said))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A rank's part of a parameter.

    Attributes:
        name: of the whole parameter, the same in every layout.
        shape: of the whole parameter.
        blocks: what of it the rank holds. Most parts are one block: some rows, such as those of some query groups, or
            some columns. A gated layer has two, some rows of the gate and some of what it lets through.
        is_copy: another rank holds the same, and what that one stores counts.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    is_copy: bool = False

    @property
    def numel(self) -> int:
        """Elements that the rank holds."""
        return sum(math.prod(block.shape) for block in self.blocks)

    def require_orderly(self) -> None:
        """Refuse blocks whose elements do not lie in the order of the whole parameter, or outside it.

        Raises:
            PlanError: they do not. What is transposed cannot be cut out by ranges.
        """
        for block in self.blocks:
            is_inside = all(0 <= a < b <= n for (a, b), n in zip(block.box, self.shape, strict=True))
            if not is_inside or not _is_orderly(block):
                raise PlanError(f"block {block} of {self.name} {self.shape}")


def _is_orderly(block: Block) -> bool:
    """Tell whether the next index of a dimension lies behind all elements of this one."""
    reach = 0
    for length, stride in zip(reversed(block.shape), reversed(block.place.strides), strict=True):
        if length > 1 and stride <= reach:
            return False
        reach += (length - 1) * stride
    return True


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A rank's part of a parameter in a bucket.

    Attributes:
        cut: the part.
        offset: of its first element in the bucket.
    """

    cut: ShardSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """What the ranks of one data-parallel group store together in one flat tensor.

    Attributes:
        key: its name in the checkpoint, without that of a state.
        numel: elements that are stored, gaps between the parameters included.
        parts: what lies in it, in order.
    """

    key: str
    numel: int
    parts: tuple[BucketEntry, ...]


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range of a bucket that lies together in a file: one parameter's part on one data-parallel rank, or a gap.

    Attributes:
        key: of the bucket.
        offset: in the bucket.
        numel: how long it is.
    """

    key: str
    offset: int
    numel: int
