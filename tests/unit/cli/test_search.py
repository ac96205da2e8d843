"""``search`` prints layouts with the command to paste, and refuses what it cannot answer in one line."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rules.import_rules import ROOT
from vtp_plugin.cli import search, search_request
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.main import main
from vtp_plugin.config.flag import parse_bytes
from vtp_plugin.host.versions import Package
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.order.placement import plain_placement
from vtp_plugin.tune.cluster.read_cluster import read_cluster
from vtp_plugin.tune.search import find_best
from vtp_plugin.tune.search.evaluate import Candidate, evaluate
from vtp_plugin.tune.search.schedule_time import pipeline_time

CLUSTER = str(ROOT / "examples" / "clusters" / "unequal.toml")
MODEL = [
    *("--num-layers", "24", "--hidden-size", "4096", "--num-attention-heads", "32", "--group-query-attention"),
    *("--num-query-groups", "8", "--ffn-hidden-size", "14336", "--swiglu", "--disable-bias-linear"),
    *("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--vocab-size", "32000", "--seq-length", "4096", "--micro-batch-size", "1", "--global-batch-size", "96"),
    *("--bf16", "--use-distributed-optimizer", "--sequence-parallel"),
]


def found(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(["search", *MODEL, *words])
    return capsys.readouterr().out


def test_the_best_layouts_are_printed_beside_those_of_stock_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    text = found(capsys, "--cluster", CLUSTER, "--vtp-stages", "1:4")
    data = json.loads(found(capsys, "--cluster", CLUSTER, "--vtp-stages", "1:4", "--json"))
    best, stock, equal = data["best"][0], data["stock"], data["equal"]
    assert data["is_complete"] and best["step_s"] < stock["step_s"] < equal["step_s"]
    assert len({*equal["layers"]}) == len({*stock["sizes"]}) == 1 < len({*stock["layers"]})
    assert [one["step_s"] for one in data["best"]] == sorted(one["step_s"] for one in data["best"])
    assert sum(best["layers"]) == 24 and best["num_cards"] == sum(best["sizes"]) * best["num_replicas"]
    assert f"by itself, takes {stock['step_s'] / best['step_s']:.3f} times as long" in text
    assert f"with equally many layers, takes {equal['step_s'] / best['step_s']:.3f} times as long" in text
    assert best["price_per_million_tokens"] > 0 and best["source"] == "data sheet"
    assert " ".join(best["flags"]) in text
    # What to do stands first, then what it leaves out.
    gain = 100 * (stock["step_s"] / best["step_s"] - 1)
    sizes = ",".join(map(str, best["sizes"]))
    verdict, *_ = text.splitlines()
    assert verdict == data["verdict"] and gain > 5
    assert re.match(
        rf"[\d.]+ % faster than the best of stock Megatron: --vtp-size-list {sizes} in \d replicas?; without", verdict
    )
    assert float(verdict.split(" %")[0]) == pytest.approx(gain, abs=0.051)
    tokens = 96 * 4096 / best["step_s"]
    assert f" {float(f'{tokens:.4g}'):,.0f} " in text and tokens > 1e4 and not re.search(r"\de\+\d", text)
    started = {rank: node["node"] for node in data["launch"]["nodes"] for rank in node["ranks"]}
    on_nodes = [name for names, size in zip(best["nodes"], best["sizes"], strict=True) for name in names * size]
    assert sorted(started) == [*range(best["num_cards"])] and sorted(started.values()) == sorted(on_nodes)
    commands = [command for node in data["launch"]["nodes"] for command in node["commands"]]
    assert all(f" -m vtp_plugin run SCRIPT FLAGS {' '.join(best['flags'])}" in command for command in commands)
    # A row for each layout: one that is found twice has two names.
    rows = [line for line in text.splitlines() if line.endswith("data sheet")]
    assert len(rows) == len({" ".join(row.split()[-9:]) for row in rows}) > 1
    # The old cards take longer for a layer, so a stage on them has fewer.
    pairs = zip(best["sizes"], best["layers"], best["nodes"], strict=True)
    rates = {nodes[0].split(".")[0]: layers / size for size, layers, nodes in pairs}
    assert rates["new"] > rates["old"]


def test_what_stock_reaches_without_the_limits_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that limit the layouts limit those of stock Megatron, too."""
    words = ("--cluster", CLUSTER, "--json")
    whole = json.loads(found(capsys, *words))
    assert whole["unlimited"] is None and "without" not in whole["verdict"]
    limits = (("--vtp-stages", "1:2"), ("--vtp-stages", "2:3", "--vtp-data-parallel-size", "1"))
    for limit in limits:
        data = json.loads(found(capsys, *words, *limit))
        best, stock, unlimited = data["best"][0], data["stock"], data["unlimited"]
        assert unlimited["step_s"] == pytest.approx(whole["stock"]["step_s"], rel=2e-3), limit
        assert unlimited["step_s"] < stock["step_s"], limit
        more = unlimited["step_s"] / best["step_s"] - 1
        end = f" {'more' if more >= 0 else 'less'} than that layout"
        named = f"; without {' '.join(limit)} stock Megatron takes {unlimited['step_s']:.4g} s a step, "
        assert named in data["verdict"] and data["verdict"].endswith(end)
        assert float(data["verdict"].removesuffix(f" %{end}").split()[-1]) == pytest.approx(abs(100 * more), abs=0.051)
    text = found(capsys, "--cluster", CLUSTER, *limits[0])
    assert "\nunlimited, stock without --vtp-stages 1:2, takes " in text and "\nflags of unlimited: --tensor" in text
    # What leaves nothing out is no limit.
    assert json.loads(found(capsys, *words, "--vtp-stages", "1:24"))["unlimited"] is None


def test_lists_limit_the_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """They say how many there are; what else they say holds for stock, too."""
    data = json.loads(found(capsys, "--cluster", CLUSTER, "--vtp-cp-list", "2,2", "--json"))
    assert "; without --vtp-cp-list 2,2 stock Megatron takes " in data["verdict"]
    whole = json.loads(found(capsys, "--cluster", CLUSTER, "--context-parallel-size", "2", "--json"))
    assert data["unlimited"]["step_s"] == pytest.approx(whole["stock"]["step_s"], rel=2e-3)


def test_what_was_parsed_stays_as_it_was() -> None:
    """Sites, lists and microbatches of a search follow from what was parsed; they are not written into it."""
    words = ("--vtp-cp-list", "2,2", "--micro-batch-sizes", "2,4", "--cluster", CLUSTER)
    parser = Parser(add_help=False)
    search.add_arguments(parser)
    args, args.unknown = parser.parse_known_args([*MODEL, *words])
    before = dict(vars(args))
    request = search_request.read_request(args, read_cluster(Path(CLUSTER)))
    assert vars(args) == before and args.vtp_cp_list == "2,2" and args.context_parallel_size is None
    assert request.constraints.args.context_parallel_size == 2 and {one.cp for one in request.problem.splits} == {2}


def test_the_flags_plan_as_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(found(capsys, "--cluster", CLUSTER, "--vtp-stages", "2:3", "--json"))
    best = data["best"][0]
    main(["plan", *MODEL, *best["flags"], "--world-size", str(best["num_cards"]), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert [stage["tp"] for stage in plan["stages"]] == best["sizes"]
    assert {stage["dp"] for stage in plan["stages"]} == {best["num_replicas"]}


EXPERTS = ("--num-experts", "8", "--moe-ffn-hidden-size", "3584", "--moe-router-topk", "2", "--vocab-size", "32000")


@pytest.mark.parametrize(
    "words",
    [
        ("--context-parallel-size", "2"),
        ("--vtp-cp-list", "2,2,2"),
        (*EXPERTS, "--expert-model-parallel-size", "2"),
        (*EXPERTS, "--context-parallel-size", "2", "--expert-model-parallel-size", "4", "--vtp-etp-list", "1,1,1"),
    ],
)
def test_other_sizes_are_those_of_all_stages(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of the flags has as many ranks, on nodes that have so many cards, and as much memory of weights."""
    data = json.loads(found(capsys, "--cluster", CLUSTER, *words, "--vtp-stages", "3:3", "--json"))
    best = data["best"][0]
    cp = 2 if "2,2,2" in words or "--context-parallel-size" in words else 1
    assert best["num_cards"] == cp * sum(best["sizes"]) * best["num_replicas"]
    taken: dict[str, int] = {}
    for size, nodes in zip(best["sizes"], best["nodes"], strict=True):
        for node in nodes:
            taken[node] = taken.get(node, 0) + cp * size
    assert all(number <= {"new": 6}.get(node, 4) for node, number in taken.items())
    main(["plan", *MODEL, *words, *best["flags"], "--world-size", str(best["num_cards"]), "--json"])
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [(stage["tp"], stage["cp"], stage["dp"]) for stage in stages] == [
        (size, cp, best["num_replicas"]) for size in best["sizes"]
    ]
    assert best["source"] == "data sheet"


def test_an_optimizer_that_counts_for_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cards.one]\nteraflops = 100\n[[nodes]]\ncards = 'one'\ncards_per_node = 1\n[links]\n")
    main(["search", *MODEL, "--cluster", str(path)])
    assert "cards.one has no memory_tbyte_per_s: its optimizer counts as 0 s" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("plan", "--vtp-size-list", "1,2"), ("search", "--help")])
def test_a_reader_that_leaves_ends_a_command_in_silence(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "vtp_plugin", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        error = process.stderr.read()
        # argparse takes no notice of who reads its help.
        assert process.wait(60) in (128 + signal.SIGPIPE, 0 if "--help" in words else None) and not error, error


def test_over_a_slow_line_a_planned_order_is_taken_where_it_gains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--vtp-stages", "2:2", "--json", "--cluster", str(tmp_path / "cluster.toml"))
    for latency_us, is_planned in ((1, False), (200_000, True)):
        (tmp_path / "cluster.toml").write_text(
            "[cards.one]\nteraflops = 100\n[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
            + "".join(f"[[nodes]]\ncards = 'one'\ncards_per_node = 1\nsite = '{site}'\n" for site in ("a", "b"))
            + f"[links.across.'a b']\nlatency_us = {latency_us}\ngbyte_per_s = 1000\n"
        )
        best = json.loads(found(capsys, *words))["best"][0]
        assert ("--vtp-schedule" in best["flags"]) is is_planned, best["flags"]


def test_over_a_slow_line_more_microbatches_are_in_flight_as_far_as_memory_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--vtp-stages", "2:2", "--json", "--cluster", str(tmp_path / "cluster.toml"))
    found_s, rows = [], []
    for memory in ("200GiB", "70GiB", "64GiB", "60GiB"):
        (tmp_path / "cluster.toml").write_text(
            f"[cards.one]\nteraflops = 1000\nmemory = '{memory}'\n"
            "[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
            + "".join(f"[[nodes]]\ncards = 'one'\ncards_per_node = 1\nsite = '{site}'\n" for site in ("a", "b"))
            + "[links.across.'a b']\nlatency_us = 100_000\ngbyte_per_s = 1\n"
        )
        best = json.loads(found(capsys, *words))["best"][0]
        found_s.append(best["step_s"])
        rows.append(best["in_flight"])
        assert max(best["memory_bytes"]) <= parse_bytes(memory)
        flag = ["--vtp-in-flight", ",".join(map(str, best["in_flight"]))]
        assert "planned" in best["flags"] and (flag[0] in best["flags"]) is (best["in_flight"] != [2, 1])
        assert flag[0] not in best["flags"] or " ".join(flag) in " ".join(best["flags"])
    # With 70 and 64 GiB the first stage gives a layer away to have one more in flight.
    assert rows == [[4, 1], [4, 1], [3, 1], [2, 1]]
    assert found_s == sorted(found_s) and found_s[0] < 0.7 * found_s[3], found_s


def test_another_transport_is_named_where_a_run_would_be_slower_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two cards on both sides of a line: a run sends all by one of them, unless it is told that both may send."""
    words = ("--vtp-stages", "2:2", "--vtp-data-parallel-size", "1", "--cluster", str(tmp_path / "cluster.toml"))
    steps = []
    for at_once, given, named in (("", "auto", False), ("at_once = 2", "auto", True), ("at_once = 2", "rank0", False)):
        (tmp_path / "cluster.toml").write_text(
            "[cards.one]\nteraflops = 100\n[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
            + "".join(f"[[nodes]]\ncards = 'one'\ncards_per_node = 2\nsite = '{site}'\n" for site in ("a", "b"))
            + f"[links.across.'a b']\nlatency_us = 1\ngbyte_per_s = 0.02\n{at_once}\n"
        )
        own = (*words, "--vtp-transport", given)
        best = json.loads(found(capsys, *own, "--json"))["best"][0]
        assert best["sizes"] == [2, 2] and best["transport"] == ("sliced" if named else given)
        assert (" --vtp-transport sliced " in " ".join(best["flags"])) is named
        assert ("also those of two sites" in found(capsys, *own)) is named
        steps.append(best["step_s"])
    assert steps[0] == steps[2] > 1.5 * steps[1]


def test_search_and_simulate_agree_on_microbatches_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--vtp-size-list", "1,1", "--vtp-force", "--vtp-schedule", "planned", "--num-microbatches", "24")
    costs = ("--vtp-costs", "forward_ms=10,10", "backward_ms=20,20", "latency_ms=50")
    steps = []
    for in_flight in ((2, 1), (6, 1)):
        main(["simulate", *words, *costs, "--vtp-in-flight", ",".join(map(str, in_flight)), "--json"])
        steps.append(json.loads(capsys.readouterr().out)["step"])
        given = Costs(forward=(10, 10), backward=(20, 20), latency=(50,), bandwidth=(float("inf"),), message_bytes=(0,))
        assert steps[-1] == pipeline_time(plain_placement(2), given, 24, in_flight=in_flight)[0]
    assert steps[1] < 0.6 * steps[0]


@pytest.mark.parametrize("is_u_shaped", [False, True])
def test_adapters_in_later_layers_leave_out_the_backward_before_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_u_shaped: bool
) -> None:
    (tmp_path / "cluster.toml").write_text(
        "[cards.one]\nteraflops = 100\n[[nodes]]\ncards = 'one'\ncards_per_node = 1\nsite = 'edge'\n"
        "[[nodes]]\ncards = 'one'\ncards_per_node = 1\ncount = 3\nsite = 'cloud'\n"
        "[links.between]\nlatency_us = 10\ngbyte_per_s = 10\n[links.across.'cloud edge']\nlatency_us = 10\n"
        "gbyte_per_s = 1\n"
    )
    words = [
        "--cluster",
        str(tmp_path / "cluster.toml"),
        "--vtp-stages",
        "4:4",
        "--transformer-impl",
        "local",
        "--json",
    ]
    words += ["--vtp-lora-rank", "16"]
    words += ["--layerwise-disaggregated-training", "--num-layer-list", "6,12,6"] if is_u_shaped else []
    every, later = (
        json.loads(found(capsys, *words, *more))["best"][0] for more in ((), ("--vtp-lora-layers", "18:24"))
    )
    assert later["step_s"] < 0.8 * every["step_s"]
    assert ("--vtp-schedule planned" in " ".join(later["flags"])) is not is_u_shaped


def test_virtual_stages_are_taken_where_they_gain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four cards that each hold a quarter of the model, and few microbatches: much of the step is filling it."""
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 100\nmemory = '60GiB'\n[[nodes]]\ncards = 'one'\ncards_per_node = 1\ncount = 4\n"
        "[links.between]\nlatency_us = 10\ngbyte_per_s = 25\n"
    )
    words = ("--cluster", str(path), "--vtp-stages", "4:4", "--global-batch-size", "8", "--json")
    plain = json.loads(found(capsys, *words))["best"][0]
    best = json.loads(found(capsys, *words, "--virtual-stages", "2,3"))["best"][0]
    assert best["step_s"] < 0.9 * plain["step_s"] and best["num_chunks"] in (2, 3) and plain["num_chunks"] == 1
    # More layers of more microbatches; the fullest stage of the other layout has one layer more.
    assert sum(plain["memory_bytes"]) < sum(best["memory_bytes"]) and max(best["memory_bytes"]) <= 60 << 30
    flag = ["--num-virtual-stages-per-pipeline-rank", str(best["num_chunks"])]
    assert flag[0] in best["flags"] and best["flags"][best["flags"].index(flag[0]) + 1] == flag[1]
    main(["plan", *MODEL, *best["flags"], "--world-size", "4", "--json"])
    assert len(json.loads(capsys.readouterr().out)["stages"]) == 4


U_SITES = """
[cards.small]
teraflops = 100
memory = "40GiB"
[cards.big]
teraflops = 400
memory = "80GiB"
[links.inside]
latency_us = 5
gbyte_per_s = 100
[links.between]
latency_us = 10
gbyte_per_s = 25
[links.across."cloud edge"]
latency_us = 20000
gbyte_per_s = 1
[[nodes]]
cards = "small"
cards_per_node = 2
site = "edge"
[[nodes]]
cards = "big"
cards_per_node = 2
count = 2
site = "cloud"
"""


def test_a_u_has_both_ends_of_the_model_on_the_edge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(U_SITES)
    words = ("--layerwise-disaggregated-training", "--num-layer-list", "2,1,1", "--vtp-stages", "2:3")
    data = json.loads(found(capsys, "--cluster", str(path), *words, "--json"))
    best = data["best"][0]
    assert data["stock"] is None and data["equal"] is None and data["is_complete"]
    assert (best["layers"][0], best["layers"][-1], sum(best["layers"])) == (2, 1, 24)
    # The edge, by far the slowest, is the bottleneck, and is never idle but for the start.
    assert best["nodes"][0] == ["small 0"] * best["num_replicas"] and best["busy"][0] > 0.95
    assert not any(node == "small 0" for nodes in best["nodes"][1:] for node in nodes)
    main(["plan", *MODEL, *words[:1], *best["flags"], "--world-size", str(best["num_cards"]), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert [(stage["tp"], stage["dp"]) for stage in plan["stages"]] == [
        (size, best["num_replicas"]) for size in best["sizes"]
    ]


def test_a_u_without_an_edge_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["--num-layer-list", "1,3,1"], "a U-shape needs an edge"),
        (["--num-layer-list", "1,3,1", "--vtp-sites", "home,cloud"], "no nodes of the cluster are at cloud"),
        (["--vtp-sites", "home,cloud"], "needs --num-layer-list for the edge's two parts"),
    ):
        with pytest.raises(SystemExit):
            main(["search", *MODEL, "--cluster", CLUSTER, "--layerwise-disaggregated-training", *words])
        assert text in capsys.readouterr().err


def test_the_best_step_and_that_of_stock_megatron_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "search.svg"
    words = ("--cluster", CLUSTER, "--vtp-stages", "2:3", "--output", str(path))
    data = json.loads(found(capsys, *words, "--json"))
    text = path.read_text()
    for name, one in (("best", data["best"][0]), ("stock", data["stock"])):
        sizes = ",".join(map(str, one["sizes"]))
        assert f"{name}: --vtp-size-list {sizes}, layers" in text and f"step {one['step_s']:.4g} s" in text
    # A row for each stage, and in each a box for the forward and the backward pass of every microbatch that is drawn.
    layouts = (data["best"][0], data["stock"])
    assert text.count(">stage ") == sum(len(one["sizes"]) for one in layouts)
    samples = int(text.split("The first ")[1].split(" samples of the layouts")[0])
    drawn = [samples // one["num_replicas"] for one in layouts]
    assert (
        max(drawn) <= 16
        and [one["num_replicas"] * number for one, number in zip(layouts, drawn, strict=True)] == [samples] * 2
    )
    boxes = sum(len(one["sizes"]) * number for one, number in zip(layouts, drawn, strict=True))
    assert [text.count(colour) for colour in ("#3f6ca8", "#b4540a")] == [1 + boxes] * 2


def test_as_many_samples_of_unlike_layouts_are_drawn() -> None:
    """Of two and of three replicas, as of two sizes of microbatches: so the lengths of two groups can be compared."""
    for samples, batch in (([2, 3], 96), ([3, 2], 96), ([1, 8], 64), ([4, 4], 8), ([7, 5], 70), ([1, 1], 1000)):
        drawn = search.samples_drawn(samples, batch)
        assert 0 < drawn <= batch and not any(drawn % each for each in samples)
        assert drawn == batch or drawn + math.lcm(*samples) > 16 * min(samples)


def test_equal_cards_stay_with_stock_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 100\n[[nodes]]\ncards = 'one'\ncards_per_node = 4\n"
        "[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
    )
    text = found(capsys, "--cluster", str(path))
    assert text.startswith("stay with stock Megatron: ")
    assert "flags of 1" not in text and "--vtp-" not in text.split("flags of")[1]
    assert "flags of stock: --tensor-model-parallel-size " in text
    # Without the plugin.
    assert " SCRIPT FLAGS --tensor-model-parallel-size " in text.split("start (")[1] and "vtp_plugin" not in text


def test_sizes_that_do_not_divide_the_default_padding_are_searched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 100\n[[nodes]]\ncards = 'one'\ncards_per_node = 3\n"
        "[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
    )
    words = ("--num-attention-heads", "12", "--num-query-groups", "3", "--hidden-size", "3072", "--seq-length", "96")
    data = json.loads(found(capsys, "--cluster", str(path), *words, "--vtp-stages", "1:1", "--json"))
    assert data["best"][0]["num_cards"] == 3


def test_sizes_of_microbatches_are_chosen_among(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", CLUSTER, "--vtp-stages", "1:3", "--json")
    one = json.loads(found(capsys, *words))
    several = json.loads(found(capsys, *words, "--micro-batch-sizes", "1,2,4"))
    assert several["best"][0]["step_s"] <= one["best"][0]["step_s"]


def test_each_size_of_microbatches_has_its_own_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A large one, for which there is no room, takes none from a small one."""
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[cards.one]\nteraflops = 100\nmemory = '44GiB'\n[[nodes]]\ncards = 'one'\ncards_per_node = 8\n"
        "[links.inside]\nlatency_us = 1\ngbyte_per_s = 1000\n"
    )
    words = ("--cluster", str(path), "--json", "--micro-batch-sizes")
    each = [json.loads(found(capsys, *words, size))["best"][0]["step_s"] for size in ("1", "2", "4")]
    both = json.loads(found(capsys, *words, "1,2,4"))["best"][0]
    assert both["step_s"] == min(each), (both["step_s"], each)
    assert len({*each}) == 3


def test_a_layout_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the same list of sizes and layers goes into the nodes in several ways."""
    for words in ((), ("--vtp-stages", "2:4"), ("--vtp-data-parallel-size", "1")):
        data = json.loads(found(capsys, "--cluster", CLUSTER, *words, "--num-best", "8", "--json"))
        rows = [(one["sizes"], one["layers"], one["num_replicas"], one["micro_batch_size"]) for one in data["best"]]
        assert len({*map(str, rows)}) == len(rows), rows


def test_flags_of_the_plugin_are_given_where_a_layout_needs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads(found(capsys, "--cluster", CLUSTER, "--num-best", "8", "--json"))
    for one in (*data["best"], data["stock"], data["equal"]):
        is_unequal, flags = len({*one["sizes"]}) > 1, one["flags"]
        is_planned = "--vtp-schedule" in flags
        # A planned schedule is the plugin's already.
        assert ("--vtp-force" in flags) is (not is_unequal and not is_planned and "--vtp-transport" in flags), flags
        assert ("--vtp-size-list" in flags) is (is_unequal or is_planned), flags
    for one in (data["stock"], data["equal"]):
        assert one["flags"][:2] == ["--tensor-model-parallel-size", str(one["sizes"][0])]
        assert not any(flag.startswith("--vtp-") for flag in one["flags"])


def test_a_padding_that_changes_the_vocabulary_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", CLUSTER, "--vtp-stages", "1:4")
    text = found(capsys, *words, "--vocab-size", "128256")
    assert (
        "the vocabulary is padded to 129,024 tokens, 128,256 with TP size 1, so that every TP size of this model"
        in text
    )
    assert "the first loss is about 0.006 higher; --make-vocab-size-divisible-by 1 pads to 128,256" in text
    assert "padded" not in found(capsys, *words, "--vocab-size", "129024")


def test_of_megatron_0_12_middle_stages_hold_as_many_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its flags name the first and the last stage only."""
    words = ("--cluster", CLUSTER, "--vtp-stages", "4:7", "--num-best", "8", "--json")
    newest = json.loads(found(capsys, *words))
    monkeypatch.setattr(search_request, "find_megatron", lambda: Package("0.12.3", ROOT))
    oldest = json.loads(found(capsys, *words))
    assert oldest["megatron"] == "Megatron 0.12.3"
    for one in (*oldest["best"], oldest["stock"]):
        assert len({*one["layers"][1:-1]}) == 1 and "--pipeline-model-parallel-layout" not in one["flags"], one
    assert "--pipeline-model-parallel-layout" in newest["stock"]["flags"]
    assert oldest["stock"]["step_s"] > newest["stock"]["step_s"]


def test_the_time_of_a_search_is_that_of_the_processor(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is busy with others a second of the clock is less."""
    clock = [0.0]

    def slow() -> float:
        clock[0] += 1e6
        return clock[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", slow)
        assert json.loads(found(capsys, "--cluster", CLUSTER, "--limit-s", "30", "--json"))["is_complete"]


def test_each_layout_says_where_its_own_times_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = "micro_batch_size = 1\nseq_length = 4096\nforward_ms"
    times = [("dense", "10\nbackward_ms = 20"), ("head", "1\nbackward_ms = 2"), ("update", "0.1")]
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[[nodes]]\ncards = 'one'\ncards_per_node = 1\n"
        + "".join(f"[[cards.one.times]]\npart = '{part}'\ntp = 1\n{row} = {time}\n" for part, time in times)
        + "[links]\n"
    )
    words = ("--cluster", str(path), "--vtp-stages", "1:1", "--json", "--micro-batch-sizes")
    assert json.loads(found(capsys, *words, "2"))["best"][0]["source"] == "fitted"
    for sizes in ("1,2", "2,1"):
        [*layouts] = json.loads(found(capsys, *words, sizes))["best"]
        sources = {one["micro_batch_size"]: one["source"] for one in layouts}
        assert sources.get(1, "measured") == "measured" and sources.get(2, "fitted") == "fitted"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--vtp-size-list", "1,2"], "--vtp-size-list 1,2 with search, which is for all layouts; leave it out"),
        (["--context-parallel-size", "8"], "--context-parallel-size 8: no node has so many devices"),
        (["--vtp-cp-list", "1,2"], "--vtp-cp-list 1,2: search knows one size for all stages; give --context-parallel"),
        (["--vtp-cp-list", "2,2", "--vtp-ep-list", "2,2,2"], "lists of different lengths: --vtp-cp-list 2, --vtp-ep"),
        (["--vtp-cp-list", "2,2", "--context-parallel-size", "4"], "contradicts --context-parallel-size; leave one of"),
        (["--vtp-cp-list", "2,2", "--vtp-stages", "1:4"], "--vtp-stages 1:4 with sizes of 2 stages; leave one out"),
        (["--global-batch-size", "7", "--micro-batch-size", "2"], "--global-batch-size 7 is no multiple of"),
        (
            ["--num-layers", "400"],
            "TiB in all, the devices have 1.094 TiB; give more devices or larger ones, or a smaller model",
        ),
        (["--output", "search.png"], "--output search.png: the name must end in .svg (picture)"),
        (["--num-best", "0"], "--num-best 0, --limit-s 60; give at least one layout and some seconds"),
        (["--tensor-model-parallel-size", "2"], "--tensor-model-parallel-size 2 with --vtp-size-list auto"),
    ],
)
def test_what_cannot_be_answered_is_refused(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["search", *MODEL, "--cluster", CLUSTER, *words])
    assert left.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vtp_plugin: error: ") and text in line


def test_ctrl_c_prints_the_best_so_far(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def interrupted(*words: Any, **options: Any) -> Candidate | None:
        if len(judged) == 3:
            raise KeyboardInterrupt
        judged.append(evaluate(*words, **options))
        return judged[-1]

    monkeypatch.setattr(find_best, "evaluate", interrupted)
    text = found(capsys, "--cluster", CLUSTER, "--vtp-stages", "1:4")
    assert text.splitlines()[1].startswith("the search ended before all layouts were bounded")
    assert f"{min(one.step_s for one in judged if one is not None):.4g} s" in text
