"""What a rank holds on a device: parts of a sequence, 8 bits, and what is no tensor of the model. Arithmetic only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vtp_plugin.plan.layout.grids import ExpertGrid, StageGrid
from vtp_plugin.plan.layout.layer_lists import Chunk, plain_chunks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activation_rows import Microbatch, Recompute, Routing, Sizes
from vtp_plugin.plan.memory.footprint import (
    ChunkBytes,
    Footprint,
    Parameter,
    Training,
    chunk_parameters,
    footprints,
    kept_by_module,
    overhead_bytes,
    waiting_by_module,
)
from vtp_plugin.plan.model.gpt_model import Experts, GPTModel

MODEL = GPTModel(
    num_layers=4,
    num_predicting=0,
    hidden=64,
    heads=8,
    groups=4,
    kv_channels=8,
    ffn=96,
    vocab=128,
    num_positions=0,
    is_gated=True,
    has_bias=False,
    has_qkv_bias=False,
    has_norm_bias=False,
    has_query_norm=True,
    is_tied=False,
)
BATCH = Microbatch(
    length=64, size=2, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True, is_engine=True,
    has_fused_rope=True,
)  # fmt: skip
MIDDLE = Chunk(layers=(1, 2), is_first=False, is_last=False, is_whole=False)
MIB = 2**20
CONNECTION = 9.1875 * MIB
ALWAYS = (28 + 32) * MIB  # the allocator's, and cuBLAS'


def kept(batch: Microbatch, chunk: Chunk = MIDDLE, tp: int = 2, cp: int = 1) -> dict[str, int]:
    return kept_by_module(Sizes(model=MODEL, batch=batch, tp=tp, cp=cp), [chunk])


@pytest.mark.parametrize("chunk", [MIDDLE, replace(MIDDLE, is_first=True, is_last=True)])
def test_a_part_of_the_sequence_keeps_as_much_as_a_shorter_one(chunk: Chunk) -> None:
    assert kept(BATCH, chunk, cp=4) == kept(replace(BATCH, length=16), chunk)
    assert 4 * sum(kept(BATCH, chunk, cp=4).values()) == sum(kept(BATCH, chunk).values())


def test_a_copy_of_the_output_is_kept_where_none_was() -> None:
    """Queries of 4 heads of 8 channels, at 64 / 2 positions, in two layers of 2 bytes."""
    single = replace(BATCH, size=1)
    one, two = (kept(batch, cp=2) for batch in (single, replace(single, has_own_output=True)))
    assert {name: two[name] - one.get(name, 0) for name in two if two[name] != one.get(name)} == {
        "linear_proj": 2 * 32 * 32 * 2
    }


@pytest.mark.parametrize(("kind", "numbers_bytes"), [("tensor", 1.0), ("block", 1.0 + 1 / 32)])
def test_eight_bits_halve_the_inputs_of_linear_layers(kind: str, numbers_bytes: float) -> None:
    half = kept(replace(BATCH, eight_bits=kind))  # type: ignore[arg-type]
    whole = kept(BATCH)
    for module in ("linear_qkv", "linear_proj", "linear_fc1"):
        assert half[module] == numbers_bytes / 2 * whole[module]
    # Of the gated layer's three parts the last one is the input of linear_fc2.
    assert half["mlp"] == (2 + numbers_bytes / 2) / 3 * whole["mlp"]
    assert half["core_attention"] == whole["core_attention"]


def test_dropout_keeps_a_byte_for_each_number() -> None:
    wet = kept(replace(BATCH, has_hidden_dropout=True, has_attention_dropout=True), replace(MIDDLE, is_first=True))
    dry = kept(BATCH, replace(MIDDLE, is_first=True))
    positions = 64 * 2 // 2
    assert sum(wet.values()) - sum(dry.values()) == (2 * 2 + 1) * positions * 64
    local = replace(BATCH, is_engine=False, has_fused_rope=False, has_attention_dropout=True)
    scores = 64 * 64 * 2 * 4
    more = sum(kept(local).values()) - sum(kept(replace(local, has_attention_dropout=False)).values())
    assert more == 2 * scores * (2 + 1)
    again = replace(local, recompute=Recompute(core_attention=True))
    assert kept(again) == kept(replace(again, has_attention_dropout=False))


def test_eight_bit_copies_are_of_linear_weights_twice() -> None:
    sizes = Sizes(model=MODEL, batch=replace(BATCH, eight_bits="tensor"), tp=2)
    grid = StageGrid(2)
    held = chunk_parameters(MODEL, replace(MIDDLE, is_first=True, is_last=True), grid, ExpertGrid(2, 1, 1))
    layer = (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96) // 2
    plain = overhead_bytes("nccl", replace(sizes, batch=BATCH), held, [MIDDLE], grid, None)
    assert overhead_bytes("nccl", sizes, held, [MIDDLE], grid, None) - plain == 2 * 2 * layer


def test_communicators_are_those_of_the_groups_with_more_than_one_rank() -> None:
    """NCCL: tensor, context, data and the world, and two neighbours; HCCL: the same, and messages between stages."""
    sizes = Sizes(model=MODEL, batch=replace(BATCH, is_engine=False), tp=2, cp=2)
    grid = StageGrid(2, 2, 3)
    assert overhead_bytes("nccl", sizes, [], [MIDDLE], grid, None) - ALWAYS == (4 * 24 + 2 * 2) * CONNECTION
    message = 64 // 2 * 2 * 64 * 2
    assert overhead_bytes("hccl", sizes, [], [MIDDLE], grid, None) - ALWAYS == 4 * 400 * MIB + 2 * 2 * message
    assert overhead_bytes("gloo", sizes, [], [MIDDLE], grid, None) == 0
    # A rank alone has no communicator; ends have one neighbour, and share a tied embedding.
    alone = replace(MIDDLE, is_first=True, is_last=True, is_whole=True)
    assert overhead_bytes("nccl", None, [], [alone], StageGrid(1), None) == ALWAYS
    first = replace(MIDDLE, is_first=True)
    tied = [Parameter(name="embedding.word_embeddings.weight", numel=1, is_shared=True)]
    assert overhead_bytes("nccl", None, tied, [first], StageGrid(1), None) - ALWAYS == (2 * 24 + 2) * CONNECTION
    # Experts over four ranks, each alone there; Transformer Engine's workspace, and four of grouped products.
    engine = replace(sizes, batch=BATCH)
    with_experts = overhead_bytes("nccl", engine, [], [MIDDLE], StageGrid(1, 1, 4), ExpertGrid(1, 4, 1))
    assert with_experts - ALWAYS == (3 * 24 + 2 * 2) * CONNECTION + 5 * 32 * MIB


def test_a_rank_holds_activations_once_for_every_microbatch_in_flight() -> None:
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None,
        backend="nccl",
    )  # fmt: skip
    layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    sparse = replace(MODEL, experts=Experts(number=4, ffn=32, shared_ffn=0, layers=(False,) * 4))
    for model in (MODEL, sparse):
        for held in footprints(model, training, layout, plain_chunks(4, 2), BATCH):
            fixed = held.weight_bytes + held.gradient_bytes + held.optimizer_bytes + held.overhead_bytes
            assert held.overhead_bytes > ALWAYS and held.activation_bytes == sum(held.kept_bytes.values()) > 0
            (chunk,) = held.chunks
            assert held.steady_bytes == fixed and chunk.activation_bytes == held.activation_bytes
            assert held.held_bytes(((3, 0),)) == fixed + 3 * chunk.activation_bytes


def test_what_waits_is_known_of_local_layers_alone() -> None:
    """Recomputed or not, since it is computed again by then."""
    routing = Routing(topk=2)
    local = replace(BATCH, is_engine=False, has_fused_rope=False, routing=routing)
    sparse = replace(MODEL, experts=Experts(number=4, ffn=32, shared_ffn=16, layers=(True,) * 4))
    for model in (MODEL, sparse):
        sizes = Sizes(model=model, batch=local, tp=2, etp=2)
        whole = waiting_by_module(sizes, [MIDDLE])
        assert whole == waiting_by_module(sizes, [replace(MIDDLE, is_first=True, is_last=True)])
        for again in (Recompute(method="block", num_layers=1), Recompute(core_attention=True, feed_forward=True)):
            assert waiting_by_module(replace(sizes, batch=replace(local, recompute=again)), [MIDDLE]) == whole
        for unknown in (BATCH, replace(local, routing=replace(routing, is_grouped=True))):
            assert waiting_by_module(replace(sizes, batch=unknown), [MIDDLE]) is None


def test_a_rank_is_fullest_with_what_takes_most_together() -> None:
    held = Footprint(
        num_parameters=1, weight_bytes=1, gradient_bytes=2, optimizer_bytes=3, overhead_bytes=4, kept_bytes={},
        chunks=(ChunkBytes(100, 30), ChunkBytes(10, None)),
    )  # fmt: skip
    assert (held.activation_bytes, held.waiting_bytes) == (110, 30)
    assert held.held_bytes(((2, 1), (3, 1))) == 10 + 2 * 100 + 30 + 3 * 10
    few, many = ((3, 0), (0, 0)), ((2, 3), (1, 0))
    assert held.fullest([few, many]) == few and held.fullest([few, ((2, 3), (2, 0))]) == ((2, 3), (2, 0))


def test_a_stage_with_larger_microbatches_keeps_more() -> None:
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None
    )
    layout = PipelineLayout.from_sizes((1, 1), world_size=2)
    chunks = plain_chunks(4, 2)
    small, large = (footprints(MODEL, training, layout, chunks, replace(BATCH, size=size)) for size in (2, 6))
    assert footprints(MODEL, training, layout, chunks, BATCH, (6, 2)) == (large[0], small[1])
    assert large[0].chunks != small[0].chunks and large[0].steady_bytes == small[0].steady_bytes
