"""``profile`` times real layers without peers, and the links between real ranks; ``search`` reads the files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.pool import Pool, start_python
from vtp_plugin.tune.cluster.machines import Part
from vtp_plugin.tune.cluster.read_cluster import read_profile
from vtp_plugin.util.text import own_command

MODEL = [
    *("--num-layers", "4", "--hidden-size", "48", "--num-attention-heads", "12", "--seq-length", "48"),
    *("--max-position-embeddings", "48", "--micro-batch-size", "1", "--vocab-size", "127"),
    *("--attention-dropout", "0", "--hidden-dropout", "0", "--make-vocab-size-divisible-by", "4"),
]
RUN = ["--vtp-device", "cpu"]  # no flags of Megatron for CPUs: the command knows them
EXPERTS = [
    *("--num-experts", "6", "--moe-layer-freq", "([0]*1+[1]*3)", "--moe-token-dispatcher-type", "alltoall"),
    *("--disable-bias-linear", "--sequence-parallel", "--moe-ffn-hidden-size", "24"),
]
# The command, how many gradients of weights were left for later, and how often it ran a layer forward.
COUNTING = """
import sys
from megatron.core.transformer.transformer_layer import TransformerLayer
from vtp_plugin.cli.main import main
from vtp_plugin.runtime.step import weight_gradients
gradient, products = weight_gradients._Waiting.gradient, []
weight_gradients._Waiting.gradient = lambda use: products.append(1) or gradient(use)
forward, calls = TransformerLayer.forward, []
def counted(*args, **kwargs):
    calls.append(1)
    return forward(*args, **kwargs)
TransformerLayer.forward = counted
main(sys.argv[1:])
print(len(products), len(calls))
"""
CLUSTER = """
[cards.here]
profile = "here.toml"
[[nodes]]
cards = "here"
cards_per_node = 3
[links.inside]
latency_us = 50
gbyte_per_s = 1
"""


@pytest.mark.needs("scripts_here")
@pytest.mark.parametrize("words", [[], EXPERTS], ids=["dense", "experts"])
def test_parts_are_timed_and_searched_with(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    sizes = ["--tp-sizes", "1,3", "--micro-batch-sizes", "1,2", "--rounds", "3"]
    text = start_python("-c", COUNTING, "profile", *MODEL, *words, *RUN, *sizes, "--out", str(path))
    _, times = read_profile(path)
    layers: list[Part] = ["dense", "experts"] if words else ["dense"]
    rows = {(time.part, time.tp, time.micro_batch_size, time.is_recomputed): time for time in times}
    parts = [(part, again) for part in layers for again in (False, True)] + [("embedding", False), ("head", False)]
    assert rows.keys() == {(part, tp, size, again) for part, again in parts for tp in (1, 3) for size in (1, 2)} | {
        ("update", tp, 1, False) for tp in (1, 3)
    }
    assert all(time.forward_s > 0 and (time.backward_s > 0) == (time.part != "update") for time in times)
    # Both parts of a layer's backward, whose own linear layers split theirs here.
    assert {time.part for time in times if time.weights_s is not None} == {*layers}
    assert all(0 < time.weights_s < time.backward_s for time in times if time.weights_s is not None)
    # What is timed, a line for each measurement, and what to do with the file; nothing of Megatron's.
    # A busy machine adds a line.
    first, *lines = (line for line in text.splitlines() if not line.startswith("warning: the machine was too busy"))
    assert ", Megatron 0." in first and "medians of 3 rounds, forward + backward" in first
    measured = [line for line in lines if re.match(r"tp [13], [12] x 48 tokens(, recomputed)?: layer .* ms", line)]
    assert len(measured) == len(layers) * 2 * 2 * 2
    assert len([line for line in lines if re.match(r"tp [13]: optimizer .* ms for each million parameters", line)]) == 2
    assert lines[-4:-1] == [
        f"wrote {path}: {len(times)} times",
        'next: write profile = "here.toml" under [cards.NAME] in the cluster file (docs/guides/search.md), then',
        f"    {own_command()} search --cluster CLUSTER.toml [Megatron's flags of the model]",
    ]
    assert len(lines) == len(measured) + 2 + 4
    # Of four linear layers each; experts have as many as got tokens.
    num_products = int(text.split()[-2])
    assert num_products == 2 * 4 * 2 * 2 * 2 * 5 if not words else num_products > 0
    # Two layers, five passes with those to warm up, with whole backwards and with split ones, two sizes of both kinds;
    # the recomputed ones run forward twice.
    assert int(text.split()[-1]) == len(layers) * 2 * 2 * 2 * (2 * 5 + 2 * 2 * 5)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    text = start_python(
        *("-m", "vtp_plugin", "search", *MODEL, *words, "--global-batch-size", "8", "--vtp-stages", "1:2"),
        *("--cluster", str(tmp_path / "cluster.toml"), "--json"),
    )
    # Parts were measured for 1 and 3 ranks; sums between ranks were not, so only a rank by itself is all measured.
    best = json.loads(text)["best"]
    assert best
    for one in best:
        assert one["source"] == ("measured" if {*one["sizes"]} == {1} else "fitted"), one


@pytest.mark.needs("scripts_here")
def test_lengths_are_timed_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    asked = ["--tp-sizes", "1", "--seq-lengths", "24,48", "--rounds", "1"]
    start_python("-m", "vtp_plugin", "profile", *MODEL, *RUN, *asked, "--out", str(path))
    _, times = read_profile(path)
    assert {(time.part, time.seq_length) for time in times if time.part != "update"} == {
        (part, length) for part in ("dense", "embedding", "head") for length in (24, 48)
    }
    assert all(time.forward_s > 0 for time in times)


def test_links_are_timed_between_the_places_that_ranks_name(pool: Pool) -> None:
    places = [("a", "edge"), ("b", "cloud"), ("b", "cloud"), ("c", "cloud")]
    told = pool.run(4, "tests.multiproc.jobs.transport_job:time_places", {"places": places})
    links = told[0]
    assert told[1:] == [None] * 3
    assert (list(links.inside), list(links.between), list(links.across)) == (["new"], ["new"], [("cloud", "edge")])
    assert list(links.sums) == ["new"] and list(links.sums["new"]) == [2]
    for link in (*links.inside.values(), *links.between.values(), *links.across.values(), links.sums["new"][2]):
        assert 1e-6 < link.latency_s < 0.1 and 1e6 < link.bytes_per_s < 1e12


@pytest.mark.parametrize(("is_shared", "at_once"), [(True, 1), (False, 2)])
def test_cards_that_share_a_wire_take_turns(is_shared: bool, at_once: int, pool: Pool, tmp_path: Path) -> None:
    """Two cards of a node send to two of another one."""
    asked = {"places": [("a", ""), ("a", ""), ("b", ""), ("b", "")], "lock": tmp_path / "lock", "is_shared": is_shared}
    links = pool.run(4, "tests.multiproc.jobs.transport_job:time_a_wire", asked)[0]
    assert (links.inside["new"].at_once, links.between["new"].at_once) == (None, at_once)
    assert 0.06 < links.between["new"].time_s(4 << 20) < 0.3
