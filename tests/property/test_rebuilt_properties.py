"""The map that is worked out against an oracle that lays out buffers forwards, as Megatron's does."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from vtp_plugin.checkpoint.format.index import Extent, StoredTensor
from vtp_plugin.checkpoint.format.infer_map import check_map, infer_map
from vtp_plugin.checkpoint.format.shard_map import Bucket, StoredRange
from vtp_plugin.errors import PlanError
from vtp_plugin.util.index_boxes import Box, volume

# Names of one layer in the order of the model, and whether ranks share their rows.
_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": False,
    "self_attention.linear_proj.weight": True,
    "self_attention.linear_qkv.weight": True,
    "mlp.linear_fc1.layer_norm_weight": False,
    "mlp.linear_fc1.weight": True,
    "mlp.linear_fc2.weight": True,
}
Spot = tuple[str, Box, int]


@dataclass
class Stored:
    """A checkpoint, as its index says, and where each part lies in which bucket."""

    weights: dict[str, StoredTensor]
    pieces: list[StoredRange]
    arguments: dict[str, Any]
    truth: dict[str, list[Spot]]


def _boxes(shape: tuple[int, ...], tp: int, *, is_cut: bool) -> list[Box]:
    rows = shape[0] // tp if is_cut else shape[0]
    return [((at, at + rows), *((0, n) for n in shape[1:])) for at in range(0, shape[0], rows)]


@st.composite
def checkpoints(draw: st.DrawFn, *, is_swapped: bool = False, is_joined: bool = False) -> Stored:
    """Draw a model, a layout and the sizes of buckets; swapped, two parameters stand in another order.

    Joined, buckets are those of Megatron 0.12, stored as one: only the first chunk of the first stage has several for
    their size, and a tied embedding has one of its own.
    """
    tp, pp, chunks = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    chunks = chunks if pp > 1 else 1
    counts = draw(st.lists(st.integers(1, 2), min_size=pp * chunks, max_size=pp * chunks))
    # In several joined buckets, what is between small parameters can be as long as one more of them.
    is_bucketed = not is_joined or draw(st.booleans())
    width = draw(st.sampled_from([64, 128]) if is_joined and is_bucketed else st.integers(1, 20))
    shapes = {name: (draw(st.integers(1, 8)) * tp, width) if is_cut else (width,) for name, is_cut in _LAYER.items()}
    is_tied = draw(st.booleans())
    weights: dict[str, StoredTensor] = {}
    depth: list[list[tuple[str, list[Box]]]] = [[] for _ in counts]

    def add(stage: int, name: str, boxes: list[Box], shape: tuple[int, ...]) -> None:
        depth[stage].append((name, [boxes[rank % len(boxes)] for rank in range(tp)]))
        known = weights.get(name)
        extents = (*(known.extents if known else ()), *((box, Extent("f")) for box in boxes))
        weights[name] = StoredTensor("float32", shape, extents)

    vocabulary = (draw(st.integers(1, 9)) * tp, width)
    embedding = _boxes(vocabulary, tp, is_cut=True)
    add(0, "embedding.word_embeddings.weight", embedding, vocabulary)
    layers = iter(range(sum(counts)))
    order = [*_LAYER]
    if is_swapped:
        at = draw(st.integers(0, len(order) - 2))
        order[at], order[at + 1] = order[at + 1], order[at]
    for stage, count in enumerate(counts):
        for layer in itertools.islice(layers, count):
            for name in order:
                shape = shapes[name]
                boxes = [((layer, layer + 1), *box) for box in _boxes(shape, tp, is_cut=_LAYER[name])]
                add(stage, f"decoder.layers.{name}", boxes, (sum(counts), *shape))
    add(len(counts) - 1, "decoder.final_layernorm.weight", [((0, width),)], (width,))
    if not is_tied:
        add(len(counts) - 1, "output_layer.weight", embedding, vocabulary)
    elif pp > 1:
        depth[-1].append(("embedding.word_embeddings.weight", embedding))
    stored = Stored(weights, [], {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}, {})
    stored.arguments |= {"virtual_pipeline_model_parallel_size": chunks, "transformer_impl": "local"}
    # Where three ranks share joined buckets, padding before an embedding alone can be as long as a small parameter.
    bucket_size, dp = draw(st.integers(1, 2000)), draw(st.sampled_from([1, 2, 4] if is_joined else [1, 2, 3]))
    if is_joined:
        stored.arguments |= {"ddp_bucket_size": bucket_size, "data_parallel_size": dp}
        stored.arguments["overlap_grad_reduce"] = is_bucketed
    alone = "embedding.word_embeddings.weight" if is_joined and is_tied and pp > 1 else None
    for (stage, parameters), rank in itertools.product(enumerate(depth), range(tp)):
        buffer = f"dp_group_idx_{rank + tp * (stage % pp)}.gbuf_idx_{stage // pp}"
        parts = [(name, boxes[rank]) for name, boxes in parameters[::-1]]
        size = None if is_joined and (stage or not is_bucketed) else bucket_size
        buckets = _lay_out(parts, size, dp, alone)
        (_store_joined if is_joined else _store)(stored, f"optimizer.distributed.{buffer}", buckets, dp)
    return stored


Laid = list[tuple[list[Spot], int]]
"""Buckets: what lies in each, and how long it is."""


def _lay_out(parts: list[tuple[str, Box]], bucket_size: int | None, dp: int, alone: str | None) -> Laid:
    """Fill buckets forwards: every parameter at a multiple of 64, a new bucket where one is large enough."""
    buckets: Laid = []
    spots: list[Spot] = []
    end = 0
    for name, box in parts:
        start = math.ceil(end / 64) * 64
        if name == alone and spots:
            # The bucket before it is as long as if this followed in it.
            buckets.append(
                (spots, start if start % dp == 0 else math.ceil(start / math.lcm(dp, 128)) * math.lcm(dp, 128))
            )
            spots, start = [], 0
        spots.append((name, box, start))
        end = start + volume(box)
        if name == alone or (bucket_size is not None and end >= bucket_size):
            buckets.append((spots, end))
            spots, end = [], 0
    return [*buckets, (spots, end)] if spots else buckets


def _store_joined(stored: Stored, buffer: str, buckets: Laid, dp: int) -> None:
    """Store all buckets as one, one behind the other."""
    del dp
    key = f"{buffer}.dtype_(torch.float32, torch.float32).bucket_idx_0"
    begin, joined = 0, []
    for spots, numel in buckets:
        joined += [(name, box, begin + start) for name, box, start in spots]
        begin += numel
    stored.pieces.append(StoredRange(key, 0, begin))
    stored.truth[key] = joined


def _store(stored: Stored, buffer: str, buckets: Laid, dp: int) -> None:
    """Store each bucket in pieces: parameters and gaps, and what each replica has of them."""
    for number, (spots, end) in enumerate(buckets):
        key = f"{buffer}.dtype_(torch.float32, torch.float32).bucket_idx_{number}"
        share = math.ceil(end / (128 * dp)) * 128
        edges = {0, end, *(cut for cut in range(0, end, share))}
        edges |= {edge for _, box, start in spots for edge in (start, start + volume(box))}
        stored.pieces += [StoredRange(key, a, b - a) for a, b in itertools.pairwise(sorted(edges))]
        stored.truth[key] = spots


def _spots(buckets: list[Bucket]) -> dict[str, list[Spot]]:
    return {
        bucket.key: [(part.shard.name, part.shard.blocks[0].box, part.offset) for part in bucket.parts]
        for bucket in buckets
    }


@settings(max_examples=150, deadline=None)
@given(stored=checkpoints())
def test_the_map_is_the_one_of_the_writer(stored: Stored) -> None:
    buckets = infer_map(stored.weights, stored.pieces, stored.arguments)
    assert _spots(buckets) == stored.truth
    assert not list(check_map("map", buckets, stored.pieces))


@settings(max_examples=150, deadline=None)
@given(stored=checkpoints(is_joined=True))
def test_the_map_of_joined_buckets_is_the_one_of_the_writer(stored: Stored) -> None:
    buckets = infer_map(stored.weights, stored.pieces, stored.arguments, is_joined=True)
    assert _spots(buckets) == stored.truth
    assert not list(check_map("map", buckets, stored.pieces, is_joined=True))


@settings(max_examples=100, deadline=None)
@given(stored=checkpoints(is_swapped=True))
def test_another_order_is_no_map_of_the_writer(stored: Stored) -> None:
    """It is refused; or where sizes hide it, some parameter is not where its master weight is, and the proof fails."""
    try:
        buckets = infer_map(stored.weights, stored.pieces, stored.arguments)
    except PlanError as error:
        assert "would lie" in str(error) or "nothing is left" in str(error)
        return
    assert list(check_map("map", buckets, stored.pieces)) or _spots(buckets) != stored.truth
