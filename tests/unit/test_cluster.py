"""A cluster's file is read key by key, times are measured, fitted or from a data sheet, and memory is a sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vtp_plugin.cluster.durations import Batch, speed_of
from vtp_plugin.cluster.machines import Card, Links, Time
from vtp_plugin.cluster.memory import held_bytes
from vtp_plugin.cluster.read import parse_cluster, read_cluster
from vtp_plugin.cluster.table import Table
from vtp_plugin.errors import ConfigError
from vtp_plugin.footprint.activations import Microbatch
from vtp_plugin.footprint.model import Experts, Model, plain_chunks
from vtp_plugin.footprint.state import Training, footprints
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.search.question import Link

MODEL = Model(
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
    size=2,
    length=16,
    itemsize_bytes=2,
    gradient_itemsize_bytes=4,
    topk=2,
    is_recomputed=False,
    shares_update=False,
)
SHEET = Card(
    name="sheet",
    memory_bytes=None,
    flops_per_s=1e6,
    memory_bytes_per_s=1e6,
    price_per_hour=None,
    times=(),
)


def measured(*rows: tuple[int, int, float, float]) -> Card:
    times = tuple(
        Time(part=part, tp=tp, micro_batch_size=size, seq_length=16, forward_s=forward, backward_s=backward)
        for tp, size, forward, backward in rows
        for part in ("dense", "head")
    )
    update = Time(part="update", tp=1, micro_batch_size=1, seq_length=16, forward_s=0.5, backward_s=0.0)
    return replace(SHEET, flops_per_s=None, times=(*times, update))


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


def test_a_card_that_says_nothing_of_a_part_is_refused() -> None:
    card = replace(measured((1, 2, 3.0, 6.0)), name="old")
    with pytest.raises(ConfigError, match="cards.old has no times of experts .it has dense, head, update"):
        speed_of(card, Links(), SPARSE, BATCH, 1, 1)


@pytest.mark.parametrize("model", [MODEL, SPARSE], ids=["dense", "experts"])
@pytest.mark.parametrize("layers", [(6,), (2, 4), (1, 3, 2)])
def test_memory_as_a_sum_is_that_of_the_plan(model: Model, layers: tuple[int, ...]) -> None:
    training = Training(
        weight_itemsize_bytes=2, gradient_itemsize_bytes=4, num_moments=2, is_distributed=False, bucket_size=None
    )
    batch = Microbatch(length=16, size=2, itemsize_bytes=2, is_sharded=True, has_rope=True, is_fused=True, routing=None)
    held = held_bytes(model, training, None if model is SPARSE else batch)
    layout = PipelineLayout.from_sizes((2,) * len(layers), world_size=2 * len(layers))
    planned = footprints(
        model, training, layout, plain_chunks(6, len(layers), layers=layers), None if model is SPARSE else batch
    )
    start = 0
    for stage, number in enumerate(layers):
        one = planned[layout.leader(stage, 0, 0)]
        in_flight = len(layers) - stage
        expected = one.weight_bytes + one.gradient_bytes + one.optimizer_bytes
        expected += (one.activation_bytes or 0) * in_flight
        assert held(2, 1, start, start + number, stage, len(layers)) == expected
        start += number


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
            r"nodes\[0\].cards is 'new', which is none of the cards old",
        ),
        ({"nodes": [{"cards": "old"}]}, r"nodes\[0\].cards_per_node is missing"),
        ({"nodes": [{"cards": "old", "cards_per_node": 0}]}, "must be a whole number from 1 on, not 0"),
        ({"nodes": []}, "no nodes; give"),
        ({"cards": {"old": {"memory": "32GiB"}}}, "cards.old has neither a profile, nor times, nor teraflops"),
        ({"cards": {"old": {"teraflops": 1, "memroy": "1GiB"}}}, "unknown key cards.old.memroy"),
        ({"cards": {"old": {"teraflops": "fast"}}}, "cards.old.teraflops must be a number from 0 on, not 'fast'"),
        ({"links": {}}, r"no link between the cards of old 0; give latency_us and gbyte_per_s in \[links.inside.old\]"),
        ({"nodes": [{"cards": "old", "cards_per_node": 1, "count": 2}]}, r"no link between the nodes of the cluster"),
        (
            {"nodes": [{"cards": "old", "cards_per_node": 1, "site": site} for site in ("edge", "cloud")]},
            r'no link between the sites cloud and edge; .* \[links.across."cloud edge"\]',
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        top = Table({**SMALL, **change}, "the file")
        parse_cluster(top, Path())
        top.done()


def test_a_file_that_is_no_toml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cards.old]\nmemory = 32GiB\n")
    with pytest.raises(ConfigError, match=r"cluster.toml is no TOML: .*line 2, column"):
        read_cluster(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_cluster(tmp_path / "none.toml")
