"""A cluster's file is read key by key, times are measured, fitted or from a data sheet, and memory is a sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.layer_lists import Chunk, plain_chunks
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.activation_rows import Microbatch, Routing
from vtp_plugin.plan.memory.footprint import Training, footprints
from vtp_plugin.plan.model.gpt_model import Experts, GPTModel
from vtp_plugin.plan.model.lora import Lora
from vtp_plugin.tune.cluster.machines import Card, Links, Time
from vtp_plugin.tune.cluster.read_cluster import HeldPart, StageMemory, parse_cluster, read_cluster, speed_of
from vtp_plugin.tune.cluster.speed import Batch, Link
from vtp_plugin.tune.search.evaluate import virtual_stages
from vtp_plugin.tune.search.problem import StageType
from vtp_plugin.tune.search.stage_cost import held_bytes_of


def _chunk(start: int, end: int, *, is_first: bool = False, is_last: bool = False) -> Chunk:
    return Chunk(layers=tuple(range(start, end)), is_first=is_first, is_last=is_last, is_whole=False)


MODEL = GPTModel(
    num_layers=6,
    num_predicting=0,
    hidden=24,
    heads=4,
    groups=2,
    kv_channels=6,
    ffn=40,
    vocab=96,
    num_positions=0,
    is_gated=True,
    has_bias=False,
    has_qkv_bias=True,
    has_norm_bias=False,
    has_query_norm=False,
    is_tied=False,
)
SPARSE = replace(MODEL, experts=Experts(number=4, ffn=20, shared_ffn=0, layers=(False, True, True, False, True, True)))
BATCH = Batch(
    size=2, length=16, itemsize_bytes=2, gradient_itemsize_bytes=4, topk=2, is_recomputed=False, shares_update=False
)
SHEET = Card(name="sheet", teraflops=1e-6, share=1.0, memory_bytes_per_s=1e6)


def measured(*rows: tuple[int, int, float, float]) -> Card:
    times = tuple(
        Time(part=part, tp=tp, micro_batch_size=size, seq_length=16, forward_s=forward, backward_s=backward)
        for tp, size, forward, backward in rows
        for part in ("dense", "head")
    )
    update = Time(part="update", tp=1, micro_batch_size=1, seq_length=16, forward_s=0.5, backward_s=0.0)
    return replace(SHEET, teraflops=None, times=(*times, update))


def test_what_was_measured_is_taken_and_what_was_not_is_fitted() -> None:
    card = measured((1, 2, 3.0, 6.0), (1, 4, 5.0, 10.0), (2, 2, 2.0, 4.0))
    assert speed_of(card, Links(), MODEL, BATCH, 1, 1).source == "measured"
    assert speed_of(card, Links(), MODEL, BATCH, 1, 1).forward_s == (3.0,) * 6
    # Three samples lie halfway between two and four.
    speed = speed_of(card, Links(), MODEL, replace(BATCH, size=3), 1, 1)
    assert speed.source == "fitted"
    assert speed.forward_s[0] == pytest.approx(4.0) and speed.backward_s[0] == pytest.approx(8.0)
    # Four ranks have a quarter of the tokens' work each; the nearest rows are those of 1 and of 2 ranks.
    speed = speed_of(card, Links(inside={"": Link(latency_s=0.0, bytes_per_s=1e30)}), MODEL, BATCH, 4, 1)
    assert speed.source == "fitted"
    assert speed.forward_s[0] == pytest.approx(1.5)


def test_a_data_sheet_gives_operations_over_their_rate_and_messages_over_the_wire() -> None:
    tokens, hidden = 32, 24
    weights = hidden * (24 + 2 * 12) + 24 + 2 * 12 + 24 * hidden + hidden * 2 * 40 + 40 * hidden + 2 * hidden
    flops = 2 * tokens * weights + 2 * tokens * 16 * 24
    alone = speed_of(SHEET, Links(), MODEL, BATCH, 1, 1)
    assert alone.forward_s[0] == pytest.approx(flops / 1e6)
    assert alone.backward_s[0] == pytest.approx(2 * flops / 1e6)
    assert alone.last_s[0] == pytest.approx(2 * tokens * 24 * 96 / 1e6)
    assert alone.gradient_bytes[2] == 4 * weights
    assert alone.gradient_bytes[0] == 4 * (weights + 96 * 24)
    assert alone.update_s[2] == pytest.approx(28 * weights / 1e6)
    # Two sums in each direction, each in two passes of a ring of two.
    wired = speed_of(SHEET, Links(inside={"": Link(latency_s=0.25, bytes_per_s=1e4)}), MODEL, BATCH, 2, 1)
    ring = 2 * (0.25 + tokens * 24 * 2 / 2 / 1e4)
    assert wired.forward_s[0] == pytest.approx(flops / 2 / 1e6 + 2 * ring)


def test_recomputed_layers_run_forward_again_and_replicas_share_the_optimizer() -> None:
    again = speed_of(SHEET, Links(), MODEL, replace(BATCH, is_recomputed=True), 1, 1)
    assert again.backward_s[0] == pytest.approx(3 * again.forward_s[0])
    assert again.last_s[1] == pytest.approx(2 * again.last_s[0])
    shared = speed_of(SHEET, Links(), MODEL, replace(BATCH, shares_update=True), 1, 3)
    assert shared.update_s[1] == pytest.approx(speed_of(SHEET, Links(), MODEL, BATCH, 1, 3).update_s[1] / 3)


def test_a_frozen_model_has_no_gradients_of_weights_and_sums_those_of_adapters() -> None:
    whole, adapted = (speed_of(SHEET, Links(), MODEL, replace(BATCH, lora=lora), 2, 2) for lora in (None, LORA))
    assert adapted.forward_s == whole.forward_s and adapted.weights_s == (0.0,) * 6
    left = [backward - weights for backward, weights in zip(whole.backward_s, whole.weights_s, strict=True)]
    assert adapted.backward_s == pytest.approx(left)
    assert adapted.last_s[1] < whole.last_s[1] and adapted.first_s[1] == 0
    heads, groups = MODEL.heads * MODEL.kv_channels, MODEL.groups * MODEL.kv_channels
    numel = 2 * MODEL.hidden + heads / 2 + groups / 2 + MODEL.ffn / 2 + MODEL.hidden
    assert adapted.gradient_bytes == (3 * numel * BATCH.gradient_itemsize_bytes,) * 6
    some = speed_of(SHEET, Links(), MODEL, replace(BATCH, lora=replace(LORA, layers=((1, 3),))), 2, 2)
    assert [bool(number) for number in some.gradient_bytes] == [False, True, True, False, False, False]
    # No gradient comes back before the first adapters.
    assert some.backward_s == (0.0, *adapted.backward_s[1:]) and some.forward_s == whole.forward_s


def test_context_parallel_ranks_share_the_sequence_and_hand_on_keys_and_values() -> None:
    links = Links(inside={"": Link(latency_s=0.25, bytes_per_s=1e4)})
    alone, two = (speed_of(SHEET, links, MODEL, replace(BATCH, cp=cp), 1, 1) for cp in (1, 2))
    # One hand-over of keys and values of two groups: 16 tokens of each rank, 2 x 6 channels each, 2 bytes.
    ring = 0.25 + 16 * 2 * 12 * 2 / 1e4
    assert two.forward_s[0] == pytest.approx(alone.forward_s[0] / 2 + ring)
    # Backward keys and values go round again, and their gradients.
    assert two.backward_s[0] == pytest.approx(alone.backward_s[0] / 2 + 2 * ring)
    assert two.last_s[0] == pytest.approx(alone.last_s[0] / 2)
    assert two.gradient_bytes == alone.gradient_bytes and two.update_s == alone.update_s
    shared = speed_of(SHEET, links, MODEL, replace(BATCH, cp=2, shares_update=True), 1, 3)
    assert shared.update_s[1] == pytest.approx(alone.update_s[1] / 6)
    # What was measured on one card is fitted to a share of the sequence.
    halved = speed_of(measured((1, 2, 3.0, 6.0)), links, MODEL, replace(BATCH, cp=2), 1, 1)
    assert halved.source == "fitted" and halved.forward_s[0] == pytest.approx(1.5 + ring)


def test_ranks_that_share_experts_send_tokens_and_keep_fewer_weights() -> None:
    links = Links(inside={"": Link(latency_s=0.25, bytes_per_s=1e4)})
    alone, two = (speed_of(SHEET, links, SPARSE, replace(BATCH, ep=ep), 1, 2) for ep in (1, 2))
    # Routing is even, so experts have as much to do; a rank sends half of two rows a token, there and back.
    assert two.forward_s == alone.forward_s and alone.peer_messages == ()
    assert (two.peers, two.peer_bytes) == (2, 32 * 2 * 24 * 2 // 2)
    assert [*two.peer_messages] == [(2, 2) if has else (0, 0) for has in SPARSE.experts.layers]  # type: ignore[union-attr]
    again = speed_of(SHEET, links, SPARSE, replace(BATCH, ep=2, is_recomputed=True), 1, 2)
    assert again.peer_messages[1] == (2, 4)
    routed = 4 * 4 * 3 * 20 * 24
    assert two.expert_bytes[1] == routed // 2 and two.expert_bytes[0] == 0
    assert two.gradient_bytes[1] == alone.gradient_bytes[1] - routed
    assert two.update_s[1] == pytest.approx(alone.update_s[1] - 28 * routed / 8 / 1e6)
    gathered = speed_of(SHEET, links, SPARSE, replace(BATCH, ep=2, is_gathered=True), 1, 2)
    assert (gathered.peer_bytes, gathered.peer_messages[1]) == (32 * 24 * 2, (2, 2))


def test_ranks_that_share_an_expert_gather_its_rows() -> None:
    links = Links(inside={"": Link(latency_s=0.25, bytes_per_s=1e4)})
    whole, cut = (speed_of(SHEET, links, SPARSE, replace(BATCH, etp=etp, ep=2), 2, 1) for etp in (1, 2))
    # Two rows of each of 32 tokens, half of them from each of two ranks: a ring of two.
    assert cut.forward_s[1] == pytest.approx(whole.forward_s[1] + 2 * (0.25 + 2 * 32 * 24 * 2 / 2 / 1e4))
    assert (whole.peers, cut.peers) == (2, 4)


def test_a_card_that_says_nothing_of_a_part_is_refused() -> None:
    card = replace(measured((1, 2, 3.0, 6.0)), name="old")
    with pytest.raises(ConfigError, match="cards.old has no times of experts .it has dense, head, update"):
        speed_of(card, Links(), SPARSE, BATCH, 1, 1)


LORA = Lora(rank=3, alpha=3, targets=("q_proj", "v_proj", "down_proj"))


@pytest.mark.parametrize(
    ("model", "lora"),
    [(MODEL, None), (SPARSE, None), (MODEL, LORA), (MODEL, replace(LORA, layers=((0, 2), (4, 5))))],
    ids=["dense", "experts", "adapters", "some-adapters"],
)
@pytest.mark.parametrize("layers", [(6,), (2, 4), (1, 3, 2)])
@pytest.mark.parametrize("is_engine", [False, True], ids=["local", "engine"])
def test_memory_as_a_sum_is_that_of_the_plan(
    model: GPTModel, lora: Lora | None, layers: tuple[int, ...], is_engine: bool
) -> None:
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None,
        backend="nccl" if is_engine else "gloo", lora=lora,
    )  # fmt: skip
    batch = Microbatch(
        length=16, size=2, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True, is_engine=is_engine,
        has_fused_rope=is_engine, has_hidden_dropout=is_engine, eight_bits="tensor" if is_engine else "",
        routing=Routing(topk=2) if model is SPARSE else None,
    )  # fmt: skip
    held = StageMemory(model, training, batch).held_bytes
    layout = PipelineLayout.from_sizes((2,) * len(layers), world_size=2 * len(layers))
    planned = footprints(model, training, layout, plain_chunks(6, len(layers), layers=layers), batch)
    start = 0
    for stage, number in enumerate(layers):
        expected = planned[layout.leader(stage, 0, 0)].held_bytes(((len(layers) - stage, 0),))
        is_last = stage == len(layers) - 1
        part = HeldPart(2, 1, start, start + number, stage == 0, is_last, len(layers) - stage)
        assert held(part) == expected
        start += number


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("layers", "num_chunks", "chunks"),
    [
        # A U: the edge has the ends of the model.
        ((1, 4, 1), 1, [[_chunk(0, 1, is_first=True), _chunk(5, 6, is_last=True)], [_chunk(1, 5)]]),
        ((4, 2), 2, [[_chunk(0, 2, is_first=True), _chunk(3, 5)], [_chunk(2, 3), _chunk(5, 6, is_last=True)]]),
    ],
    ids=["U", "interleaved"],
)
def test_virtual_stages_of_a_rank_share_communicators(
    layers: tuple[int, ...], num_chunks: int, chunks: list[list[Chunk]], is_tied: bool
) -> None:
    model = replace(MODEL, is_tied=is_tied)
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None,
        backend="nccl",
    )  # fmt: skip
    batch = Microbatch(length=16, size=2, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True)
    planned = footprints(model, training, PipelineLayout.from_sizes((2, 4), world_size=6), chunks, batch)
    memory = StageMemory(model, training, batch)
    shape: Any = SimpleNamespace(num_replicas=1, held_bytes=memory.held_bytes, counted_twice=memory.counted_twice)
    placement, parts = virtual_stages(2, layers, num_chunks)
    # Two activations and a microbatch that waits, of the next chunk one more of each.
    kept = [tuple((2 + chunk, 1 + chunk) for chunk, _ in enumerate(own)) for own in chunks]
    found = held_bytes_of(shape, [StageType((0,), 2), StageType((0,), 4)], placement, parts, [[one] for one in kept])
    assert found == [planned[0].held_bytes(kept[0]), planned[2].held_bytes(kept[1])]
    assert planned[0].overhead_bytes > 1 << 20


def test_memory_of_ranks_that_share_a_sequence_and_experts_is_that_of_the_plan() -> None:
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None,
        backend="hccl",
    )  # fmt: skip
    batch = Microbatch(
        length=16, size=2, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True, is_engine=True,
        routing=Routing(topk=2),
    )  # fmt: skip
    held = StageMemory(SPARSE, training, batch, cp=2, ep=4).held_bytes
    layout = PipelineLayout.from_sizes((2, 2), world_size=16, cp=2, ep=4)
    planned = footprints(SPARSE, training, layout, plain_chunks(6, 2, layers=(2, 4)), batch)
    for stage, (start, end) in enumerate(((0, 2), (2, 6))):
        expected = planned[layout.leader(stage, 0, 0)].held_bytes(((2 - stage, 0),))
        assert held(HeldPart(2, 2, start, end, stage == 0, stage == 1, 2 - stage)) == expected


SMALL: dict[str, Any] = {
    "cards": {"old": {"memory": "32GiB", "teraflops": 100}},
    "nodes": [{"cards": "old", "cards_per_node": 4}],
    "links": {"inside": {"latency_us": 5, "gbyte_per_s": 50}},
}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"nodes": [{"cards": "new", "cards_per_node": 4}]},
            r"nodes\[0\] is of the kind 'new'; known kinds are old; use one",
        ),
        ({"nodes": [{"cards": "old"}]}, r"has no 'cards_per_node' at \[nodes\]\[0\]"),
        ({"nodes": [{"cards": "old", "cards_per_node": 0}]}, "has 0 at .*, which must be a whole number from 1 on"),
        ({"nodes": []}, "no nodes; give"),
        ({"cards": {"old": {"memory": "32GiB"}}}, "cards.old has neither `profile`, nor `times`, nor `teraflops`"),
        (
            {"cards": {"old": {"teraflops": 1, "memroy": "1GiB"}}},
            "has 'memroy' at .*, which is unknown; do you mean memory",
        ),
        (
            {"cards": {"old": {"teraflops": "fast"}}},
            r'has "fast" at \[cards\].*, which must be a number from 0 on',
        ),
        (
            {"links": {}},
            r"no link between the devices of old 0; give latency_us and gbyte_per_s in \[links.inside.old\]",
        ),
        ({"nodes": [{"cards": "old", "cards_per_node": 1, "count": 2}]}, r"no link between the nodes of the cluster"),
        (
            {"nodes": [{"cards": "old", "cards_per_node": 1, "site": site} for site in ("edge", "cloud")]},
            r'no link between the sites cloud and edge; .* \[links.across."cloud edge"\]',
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse_cluster({**SMALL, **change}, Path())


def test_what_the_file_says_goes_before_a_profile_of_links(tmp_path: Path) -> None:
    """Also a link for all cards before one that was measured for one kind; what the file does not say stays."""
    link = "latency_us = {}\ngbyte_per_s = 1\n"
    (tmp_path / "links.toml").write_text(
        "".join(f"[{name}]\n{link.format(7)}" for name in ("inside.old", "between", "sums.2", "sums.4", "sums.old.2"))
    )
    top = {**SMALL, "links": {"profile": "links.toml", "inside": {"latency_us": 5, "gbyte_per_s": 50}}}
    links = parse_cluster(top, tmp_path).links
    assert links.inside_of("old").latency_s == 5e-6 and links.between_of("", "old").latency_s == 7e-6
    top = {**SMALL, "links": {"inside": {"latency_us": 5, "gbyte_per_s": 50, "at_once": 4}}}
    assert links.inside_of("old").at_once is None and parse_cluster(top, tmp_path).links.inside_of("old").at_once == 4
    top = {**SMALL, "links": {"profile": "links.toml", "sums": {"2": {"latency_us": 5, "gbyte_per_s": 50}}}}
    links = parse_cluster(top, tmp_path).links
    found = [links.sum_of("old", number) for number in (2, 4)]
    assert [one and one.latency_s for one in found] == [5e-6, 7e-6] and links.inside_of("old").latency_s == 7e-6


def test_links_between_nodes_are_by_kind_of_card_or_by_site() -> None:
    """That of a kind goes before that of its site, which goes before the one for all."""
    rates = {"gbyte_per_s": 25, "cloud": {"gbyte_per_s": 10}, "old": {"gbyte_per_s": 2}}
    between = {key: value | {"latency_us": 5} if isinstance(value, dict) else value for key, value in rates.items()}
    inside = {"latency_us": 5, "gbyte_per_s": 50}
    links = {"inside": inside, "between": between | {"latency_us": 5}}
    found = parse_cluster({**SMALL, "links": links}, Path()).links
    rate = [
        found.between_of(*virtual_stages).bytes_per_s / 1e9
        for virtual_stages in (("", "new"), ("cloud", "new"), ("cloud", "old"))
    ]
    assert rate == [25, 10, 2]
    nodes = [{"cards": "old", "cards_per_node": 1, "site": "old"}]
    with pytest.raises(ConfigError, match=r"\[links.between.old\] may mean the kind of device or the site old"):
        parse_cluster({**SMALL, "nodes": nodes, "links": links}, Path())


def test_a_file_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cards.old]\nmemory = 32GiB\n")
    with pytest.raises(ConfigError, match=r"cluster.toml is no TOML: .*line 2, column"):
        read_cluster(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none.toml")
