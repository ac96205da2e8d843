"""How tensors are cut: shards, the order of a model, and the map file that says where shards lie.

Lists the parameters of a Megatron GPT model in the order in which a rank's model holds them, by stored name.

The order is that of ``vtp_plugin/plan/model/gpt_model.py``. Transformer Engine's was read in its source
(``LayerNormLinear`` holds its norm before its weight) and has not been run.

How a rank's shard is cut out of a whole parameter, and where it lies in what the distributed optimizer stores.

The distributed optimizer puts the parameters of a rank one after another into buckets, and stores each bucket as one
flat tensor, in pieces: each data-parallel rank writes its share. A rank's parameter is a shard of a whole one, whose
name and shape are the same in all layouts. Its blocks say which elements it has, and how they lie in the rank's memory.

The map file: where each parameter lies in the buckets that the distributed optimizer has stored.

It lies beside ``metadata.json`` and is written with the checkpoint. It holds names and shapes of the parameters once,
then every bucket with its shards: which parameter, where, whether another rank holds the same, and its blocks.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import StoredTensor
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.model.gpt_model import BEFORE_LAYERS, FINAL_NORM, LAYER, LAYERS, OUTPUT
from vtp_plugin.util.index_boxes import Box, box_shape, volume, whole_box
from vtp_plugin.util.typed_json import MAX_INDEX_BYTES, count, read_json

_SECTIONS: Final = (*(row.module for row in BEFORE_LAYERS), LAYERS, FINAL_NORM[0].module, OUTPUT.module)
_EXPERTS: Final = "mlp.experts"
_MODULES: Final = tuple(dict.fromkeys(_EXPERTS if row.is_routed else row.module for row in LAYER))
_LEAVES: Final = ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "gate_weight", "softmax_offset")
# Local layers keep their norms beside what they come before, and store them as part of it.
_STORED_AS: Final = {row.key.rpartition(".")[0]: row.module for row in LAYER if row.stored_as and not row.is_routed}
_BUFFERS: Final = re.compile(r".*\.router\.(expert_bias|local_tokens_per_expert|qb_beta)")
_LAYER: Final = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT: Final = re.compile(r"mlp\.experts\.(?:experts\.)?(?:(\d+)\.)?(linear_fc[12])\.(weight|bias)")
Order = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameter:
    """A parameter of one layer, with the shard of every rank.

    Attributes:
        order: sort key of its position in the model.
        shards: the shard of every tensor-parallel rank.
        dtype: type of its weight.
        expert: number of its expert; None if it belongs to none.
    """

    order: Order
    shards: tuple[ShardSpec, ...]
    dtype: str
    expert: int | None = None


def parameters_of(weights: Mapping[str, StoredTensor], arguments: Mapping[str, Any]) -> list[ModelParameter]:
    """List the parameters of a model in its order.

    Args:
        weights: the stored weights, by name.
        arguments: arguments of the run that stored them.

    Raises:
        PlanError: what a parameter is called, or how it is cut, is not known; the text says which.
    """
    found = [
        parameter
        for name, tensor in weights.items()
        if not _BUFFERS.fullmatch(name)
        for parameter in _parameters(name, tensor, arguments)
    ]
    return sorted(found, key=lambda parameter: parameter.order)


def expert_ranks(arguments: Mapping[str, Any]) -> int:
    """Return how many ranks share an expert.

    >>> expert_ranks({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": None})
    2
    """
    return int(arguments.get("expert_tensor_parallel_size") or arguments["tensor_model_parallel_size"])


def _parameters(name: str, tensor: StoredTensor, arguments: Mapping[str, Any]) -> Iterator[ModelParameter]:
    """Yield the parameters stored under one name, whose first dimensions are layers, and experts in them."""
    layer = _LAYER.fullmatch(name)
    section = next((i for i, start in enumerate(_SECTIONS) if name.startswith(f"{start}.")), None)
    if section is None:
        raise PlanError(f"{name} is no parameter of a GPT model")
    if layer is None:
        numbers: tuple[int | None, ...] = (0,)
        inner = name.removeprefix(_SECTIONS[section])
    else:
        numbers, inner = (None if layer.group(1) is None else int(layer.group(1)),), layer.group(2)
    expert = _EXPERT.fullmatch(inner)
    if expert is not None:
        numbers = (*numbers, None if expert.group(1) is None else int(expert.group(1)))
    num_prepended = numbers.count(None)
    size = expert_ranks(arguments) if expert else arguments["tensor_model_parallel_size"]
    by_numbers: defaultdict[tuple[int, ...], list[Box]] = defaultdict(list)
    for box, _ in tensor.extents:
        by_numbers[tuple(start for start, _ in box[:num_prepended])].append(box)
    for prepended, boxes in by_numbers.items():
        stored = iter(prepended)
        own = [next(stored) if number is None else number for number in numbers]
        is_gated = bool(arguments.get("swiglu")) and ".linear_fc1." in name and "layer_norm" not in name
        yield ModelParameter(
            order=(section, own[0], *_order_in_layer(name, inner, expert, own[-1], arguments)),
            shards=tuple(_shards(name, tensor.shape, boxes, size, num_prepended, is_gated=is_gated)),
            dtype=tensor.dtype,
            expert=own[1] if expert else None,
        )


def _order_in_layer(
    name: str, inner: str, expert: re.Match[str] | None, number: int, arguments: Mapping[str, Any]
) -> Order:
    module, _, leaf = inner.rpartition(".")
    if leaf not in _LEAVES:
        raise PlanError(f"{name} is no parameter of a GPT model")
    if not module:  # of no layer
        return (_LEAVES.index(leaf),)
    if expert is not None:
        layer, place = int(expert.group(2)[-1]), _LEAVES.index(leaf)
        # Experts one after another, or all in one module.
        is_grouped = bool(arguments.get("moe_grouped_gemm"))
        inside = (layer, place, number) if is_grouped else (number, layer, place)
        return (_MODULES.index(_EXPERTS), *inside)
    if arguments.get("transformer_impl") == "local" and leaf.startswith("layer_norm_"):
        module = _STORED_AS.get(module, module)
    if module not in _MODULES:
        raise PlanError(f"{name} is no parameter of a GPT model")
    return (_MODULES.index(module), _LEAVES.index(leaf))


def _shards(
    name: str, shape: tuple[int, ...], boxes: list[Box], size: int, num_prepended: int, *, is_gated: bool
) -> Iterator[ShardSpec]:
    """Yield the shard of every rank: one box each, two for a gated layer, or the whole tensor for all."""
    ordered = sorted(boxes)
    num_halves = 2 if is_gated else 1
    if len(ordered) not in (num_halves, num_halves * size):
        raise PlanError(f"{name} is cut into {len(ordered)} by {size} ranks")
    num_cuts = len(ordered) // num_halves
    for rank in range(size):
        own = [ordered[rank % num_cuts + half * num_cuts] for half in range(num_halves)]
        sizes = [volume(box) for box in own]
        blocks = tuple(
            block_at(box, sum(sizes[:index]), (*(1,) * num_prepended, *row_major(box_shape(box[num_prepended:]))))
            for index, box in enumerate(own)
        )
        yield ShardSpec(name=name, shape=shape, blocks=blocks, is_copy=rank >= num_cuts)


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


MAP: Final = "vtp_optimizer_map.json"
"""The name of the file."""
_VERSION = 1
_WAY_OUT = "copy it again, or load only the weights with --no-load-optim"


def dump_map(buckets: Iterable[Bucket]) -> str:
    """Write a map, one line for a bucket.

    >>> block = Block(((0, 2), (0, 3)), Strided(0, (3, 1)))
    >>> print(dump_map([Bucket("0", 8, (BucketEntry(ShardSpec(name="w", shape=(4, 3), blocks=(block,)), 2),))]))
    {"version":1,"parameters":[["w",[4,3]]],"buckets":[
    ["0",8,[[0,2,0,[[[[0,2],[0,3]]]]]]]
    ]}
    """
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    rows: list[Any] = []
    for bucket in buckets:
        parts = [
            (
                numbers.setdefault((shard.name, shard.shape), len(numbers)),
                part.offset,
                int(shard.is_copy),
                [_packed(block) for block in shard.blocks],
            )
            for part in bucket.parts
            for shard in (part.shard,)
        ]
        rows.append((bucket.key, bucket.numel, parts))
    lines = ",\n".join(map(_json, rows))
    return f'{{"version":{_VERSION},"parameters":{_json(list(numbers))},"buckets":[\n{lines}\n]}}'


def load_map(file: Path) -> tuple[Bucket, ...] | None:
    """Read a map; None if there is none.

    Raises:
        ConfigError: it is damaged, or a newer version of the plugin wrote it.
    """
    try:
        read = read_json(file, MAX_INDEX_BYTES)
        if read["version"] == _VERSION:
            parameters = [(str(name), _counts(shape)) for name, shape in read["parameters"]]
            return tuple(_bucket(row, parameters) for row in read["buckets"])
        version = int(read["version"])
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); it says where the optimizer lies; {_WAY_OUT}"
        ) from None
    except (ValueError, TypeError, LookupError):
        raise ConfigError(f"{file} is damaged; it says where the optimizer lies; {_WAY_OUT}") from None
    raise ConfigError(
        f"{file} is a map of version {version}, and this vtp_plugin reads version {_VERSION}; use the one that wrote "
        "it, or load only the weights with --no-load-optim"
    )


def _bucket(row: Any, parameters: list[tuple[str, tuple[int, ...]]]) -> Bucket:
    key, numel, parts = row
    return Bucket(str(key), count(numel), tuple(_placed(part, parameters) for part in parts))


def _placed(row: Any, parameters: list[tuple[str, tuple[int, ...]]]) -> BucketEntry:
    number, offset, is_copy, blocks = row
    name, shape = parameters[count(number)]
    shard = ShardSpec(name=name, shape=shape, blocks=tuple(map(_unpacked, blocks)), is_copy=bool(is_copy))
    return BucketEntry(shard, count(offset))


def _packed(block: Block) -> list[Any]:
    """Write a block, without its layout where that is a whole tensor without gaps."""
    if block.strided == Strided(0, row_major(block.shape)):
        return [block.box]
    return [block.box, block.strided.offset, block.strided.strides]


def _unpacked(row: Any) -> Block:
    box = tuple((count(start), count(stop)) for start, stop in row[0])
    strided = Strided(0, row_major(box_shape(box))) if len(row) == 1 else Strided(count(row[1]), _counts(row[2]))
    return Block(box, strided)


def _counts(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(count, values))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def boxes_between(shape: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """Yield boxes that hold the elements from one to before another, counted in the order of memory.

    >>> list(boxes_between((3, 4), 2, 9))
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if first >= last:
        return
    if not shape:
        yield ()
        return
    rest = shape[1:]
    row_size = math.prod(rest)
    (row, begin), (end_row, end) = divmod(first, row_size), divmod(last, row_size)
    if begin:
        stop = end if row == end_row else row_size
        yield from (((row, row + 1), *box) for box in boxes_between(rest, begin, stop))
        if row == end_row:
            return
        row += 1
    if row < end_row:
        yield ((row, end_row), *whole_box(rest))
    if end:
        yield from (((end_row, end_row + 1), *box) for box in boxes_between(rest, 0, end))
