"""How a rank's shard is cut out of a whole parameter, and where it lies in what the distributed optimizer stores.

The distributed optimizer puts the parameters of a rank one after another into buckets, and stores each bucket as one
flat tensor, in pieces: each data-parallel rank writes its share. A rank's parameter is a shard of a whole one, whose
name and shape are the same in all layouts. Its blocks say which elements it has, and how they lie in the rank's memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from vtp_plugin.errors import PlanError
from vtp_plugin.util.index_boxes import Box, box_shape


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(accumulate(shape[:0:-1], initial=1, func=lambda a, b: a * b))[::-1] if shape else ()


@dataclass(frozen=True, slots=True)
class Strided:
    """Where the elements of a box lie in flat memory.

    Attributes:
        offset: offset of the box's first element.
        strides: distance of neighbouring elements in each dimension.
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
        """Return the same layout, moved by so many elements."""
        return Strided(self.offset + by, self.strides)


@dataclass(frozen=True, slots=True)
class Block:
    """A box of a whole parameter, and where its elements lie in the flat memory of a rank's part.

    Attributes:
        box: the box, in coordinates of the whole parameter.
        strided: where its elements lie in the rank's memory.
    """

    box: Box
    strided: Strided

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the box."""
        return box_shape(self.box)


def block_at(box: Box, offset: int, strides: tuple[int, ...]) -> Block:
    """Make a block from a tensor's offset and strides.

    Dimensions of length 1 get the stride of a contiguous tensor: theirs means nothing, and equal blocks compare equal.

    >>> block_at(((3, 4), (0, 2), (0, 3)), 6, (99, 3, 1))
    Block(box=((3, 4), (0, 2), (0, 3)), strided=Strided(offset=6, strides=(6, 3, 1)))
    """
    reversed_strides: list[int] = []
    reach = 1
    for (start, stop), stride in zip(reversed(box), reversed(strides), strict=True):
        reversed_strides.append(reach if stop - start == 1 else stride)
        reach += (stop - start - 1) * reversed_strides[-1]
    return Block(box, Strided(offset, tuple(reversed(reversed_strides))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A rank's shard of a parameter.

    Attributes:
        name: name of the whole parameter, the same in every layout.
        shape: shape of the whole parameter.
        blocks: the blocks that the rank holds. Most shards are one block: some rows, such as those of some query
            groups, or some columns. A gated layer has two: some rows of the gate, and some of the projection beside it.
        is_copy: whether another rank holds the same and stores it.
    """

    name: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]
    is_copy: bool = False

    @property
    def numel(self) -> int:
        """Number of elements that the rank holds."""
        return sum(math.prod(block.shape) for block in self.blocks)

    def require_orderly(self) -> None:
        """Refuse blocks that lie outside the whole parameter, or whose elements are not in its order.

        Raises:
            PlanError: a block is like that, such as a transposed one, which ranges cannot address.
        """
        for block in self.blocks:
            is_inside = all(0 <= a < b <= n for (a, b), n in zip(block.box, self.shape, strict=True))
            if not is_inside or not _is_orderly(block):
                raise PlanError(f"block {block} of {self.name} {self.shape}")


def _is_orderly(block: Block) -> bool:
    """Tell whether the next index of a dimension lies behind all elements of this one."""
    reach = 0
    for length, stride in zip(reversed(block.shape), reversed(block.strided.strides), strict=True):
        if length > 1 and stride <= reach:
            return False
        reach += (length - 1) * stride
    return True


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """A shard in a bucket.

    Attributes:
        shard: the shard.
        offset: offset of its first element in the bucket.
    """

    shard: ShardSpec
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of the distributed optimizer, which the ranks of a data-parallel group store as one flat tensor.

    Attributes:
        key: key of the bucket in the checkpoint, without the name of a state.
        numel: number of stored elements, gaps between the parameters included.
        parts: the shards in it, in order.
    """

    key: str
    numel: int
    parts: tuple[BucketEntry, ...]


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A range of a bucket that is contiguous in a file: a data-parallel rank's part of one parameter, or a gap.

    Attributes:
        key: key of the bucket.
        offset: offset of the range in the bucket.
        numel: number of elements in the range.
    """

    key: str
    offset: int
    numel: int
