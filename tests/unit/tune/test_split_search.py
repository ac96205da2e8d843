"""Where split backwards are allowed, the search takes them if they gain and fit, and prints the flags that run them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.test_search import CLUSTER, U_SITES
from tests.unit.cli.test_search import MODEL as ENGINE_MODEL
from vtp_plugin.cli.main import main
from vtp_plugin.config.flag import parse_bytes
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement, u_placement
from vtp_plugin.tune.search import evaluate
from vtp_plugin.tune.search.schedule_time import choose_order, choose_split_order, compiled_for, pipeline_time

# Backwards are split in Megatron's own linear layers.
MODEL = [*ENGINE_MODEL, "--transformer-impl", "local"]
SPLIT = "--vtp-split-backward"
FEW = ("--vtp-data-parallel-size", "1", "--global-batch-size", "8", "--vtp-stages", "3:3")
# The second stage has a third of the others' speed, and so little memory that it cannot give all its layers away.
SLOW = """
[cards.quick]
teraflops = 300
memory = "{memory}"
[cards.slow]
teraflops = 100
memory = "{memory}"
[links.between]
latency_us = 10
gbyte_per_s = 25
[[nodes]]
cards = "quick"
cards_per_node = 1
count = 2
[[nodes]]
cards = "slow"
cards_per_node = 1
"""


def printed(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> Any:
    main([command, *MODEL, *words, "--json"])
    return json.loads(capsys.readouterr().out)


def slow_cluster(folder: Path, memory: str) -> str:
    path = folder / "cluster.toml"
    path.write_text(SLOW.format(memory=memory))
    return str(path)


def test_a_layout_is_never_slower_where_split_backwards_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", CLUSTER, "--vtp-stages", "1:3", "--global-batch-size", "24", "--num-best", "3")
    without, allowed = printed(capsys, "search", *words), printed(capsys, "search", *words, SPLIT)
    assert len(allowed["best"]) == len(without["best"]) == 3
    for one, other in zip(allowed["best"], without["best"], strict=True):
        assert one["step_s"] <= other["step_s"]
        is_split = SPLIT in one["flags"]
        assert (one["step_s"] < (one["whole_step_s"] or 0)) is is_split
        assert not is_split or one["flags"][one["flags"].index("--vtp-schedule") + 1] == "planned"
    steps = [one["step_s"] for one in allowed["best"]]
    assert steps == sorted(steps) and steps[0] < without["best"][0]["step_s"]
    # What Megatron can do alone has whole backwards.
    assert (allowed["stock"]["step_s"], allowed["equal"]["step_s"]) == (
        without["stock"]["step_s"],
        without["equal"]["step_s"],
    )
    assert all(SPLIT not in one["flags"] for one in (*without["best"], allowed["stock"], allowed["equal"]))


def test_the_flags_simulate_to_the_step_that_was_promised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[evaluate.Candidate] = []
    split = evaluate.with_split
    monkeypatch.setattr(
        "vtp_plugin.tune.search.find_best.with_split", lambda *args: chosen.append(split(*args)) or chosen[-1]
    )
    words = (*FEW, "--cluster", slow_cluster(tmp_path, "200GiB"), "--num-best", "1", SPLIT)
    best = printed(capsys, "search", *words)["best"][0]
    assert best["step_s"] < 0.97 * best["whole_step_s"] and SPLIT in best["flags"]
    costs = min(chosen, key=lambda candidate: candidate.step_s).costs
    given = [
        f"{name}={','.join(repr(1e3 * value) for value in row)}"
        for name, row in (
            ("forward_ms", costs.forward),
            ("backward_ms", costs.backward),
            ("weights_ms", costs.weights),
            ("latency_ms", costs.latency),
        )
    ]
    given += [f"mbit={','.join(str(8e-6 * rate) for rate in costs.bandwidth)}"]
    given += [f"message_kib={','.join(str(size / 1024) for size in costs.message_bytes)}"]
    simulated = printed(capsys, "simulate", *FEW[:4], *best["flags"], "--vtp-costs", *given)
    assert simulated["step"] == pytest.approx(1e3 * best["pipeline_s"], rel=1e-9)
    assert [row["in_flight"] for row in simulated["stages"]] == best["in_flight"]
    main(["search", *MODEL, *words])
    text = capsys.readouterr().out
    header = next(line for line in text.splitlines() if "TP sizes" in line)
    assert "whole backwards" in header and f"{best['whole_step_s']:.4g} s" in text
    assert text.count(f" {SPLIT}") >= 2 and "--no-gradient-accumulation-fusion" in text
    # The head's own gradient of weights comes with that of its input, a layer's takes half of its backward.
    shares = [part / whole for part, whole in zip(costs.weights, costs.backward, strict=True)]
    assert shares[-1] < 0.49 < shares[0] <= 0.5


def test_what_no_run_can_split_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--cluster", slow_cluster(tmp_path, "200GiB"), SPLIT, "--transformer-impl", "transformer_engine")
    with pytest.raises(SystemExit):
        main(["search", *MODEL, *FEW, *words])
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("vtp_plugin: error: ") and f"with {SPLIT}" in line and "--transformer-impl local" in line


def test_a_stage_keeps_no_more_than_its_memory_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gains, rows = [], []
    # Else scores fill the memory.
    again = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
    for memory in ("200GiB", "58GiB", "48GiB"):
        words = (*FEW, *again, "--cluster", slow_cluster(tmp_path, memory), "--num-best", "1", SPLIT)
        best = printed(capsys, "search", *words)["best"][0]
        assert max(best["memory_bytes"]) <= parse_bytes(memory)
        assert SPLIT in best["flags"] and ("--vtp-in-flight" in best["flags"]) is (memory != "200GiB")
        gains.append(best["whole_step_s"] / best["step_s"])
        rows.append(best["in_flight"])
    # In the last one's memory 1F1B has no more in flight: then only the end of the step is filled, and less is gained.
    assert rows == [[3, 3, 2], [3, 2, 2], [3, 2, 1]] and 1.05 < gains[2] < min(gains[:2]), (gains, rows)


def all_kept(kept: Sequence[Sequence[Kept]]) -> int:
    """Count what stages keep at their fullest, activations and what waits alike."""
    return sum(max(sum(map(sum, moment)) for moment in moments) for moments in kept)


FOUR, U = interleaved_placement(4, 2), u_placement(4)


@pytest.mark.parametrize(
    ("placement", "costs"), [(FOUR, uniform_costs(FOUR, latency=1.0)), (U, u_costs(4, latency=1.0))]
)
def test_an_order_that_does_not_fit_is_not_taken(placement: Placement, costs: Costs) -> None:
    whole = choose_order(placement, costs, 8, (), lambda _: True)
    assert whole is not None
    free = choose_split_order(placement, costs, 8, (), lambda _: True, whole)
    assert free.is_split and free.pipeline_s < whole.pipeline_s and all_kept(free.kept) > all_kept(whole.kept)

    def fits(kept: Sequence[Sequence[Kept]]) -> bool:
        return all_kept(kept) <= all_kept(whole.kept)

    tight = choose_split_order(placement, costs, 8, (), fits, whole)
    assert fits(tight.kept) and free.pipeline_s < tight.pipeline_s <= whole.pipeline_s
    # A U may have fewer in flight; nothing limits how many an interleaved pipeline has.
    assert tight.is_split is (placement == U)


def test_a_later_stage_may_keep_more_than_one_before_it() -> None:
    """Its gradients of weights may wait, while those of the stage before, which has less memory, are there."""
    placement = plain_placement(4)
    durations = (2.0, 1.0, 1.0, 2.0)
    costs = replace(
        uniform_costs(placement, latency=1.0), forward=durations, backward=tuple(2 * one for one in durations),
        weights=durations,
    )  # fmt: skip
    whole = choose_order(placement, costs, 8, (4, 3, 2, 1), lambda _: True)
    assert whole is not None
    grown, cut = (
        choose_split_order(placement, costs, 8, most, lambda _: True, whole) for most in ((4, 3, 2, 4), (4, 3, 2, 2))
    )
    assert (grown.in_flight, cut.in_flight) == ((4, 3, 2, 4), (4, 3, 2, 2))
    assert grown.peaks[3] > cut.peaks[3] and grown.pipeline_s < 0.97 * cut.pipeline_s


@pytest.mark.parametrize(
    ("placement", "costs"),
    [
        (plain_placement(3), uniform_costs(plain_placement(3), latency=0.5)),
        (FOUR, replace(uniform_costs(FOUR, latency=0.5), forward=(1, 2, 3, 1, 2, 3, 1, 2), weights=(0.5, 1) * 4)),
        (U, replace(u_costs(4, latency=1.0), weights=(1, 1, 2, 3, 1))),
    ],
)
def test_a_long_step_is_simulated_as_far_as_it_is_regular(placement: Placement, costs: Costs) -> None:
    found = pipeline_time(placement, costs, 64, is_split=True)
    whole = compiled_for(placement, costs, 64, is_planned=True, is_split=True)
    assert found.is_split and found.pipeline_s == pytest.approx(
        whole.times(costs, mode="rendezvous").makespan, rel=1e-3
    )


U_WORDS = ("--layerwise-disaggregated-training", "--num-layer-list", "2,1,1", "--vtp-stages", "2:3")


def test_a_u_needs_no_other_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(U_SITES)
    words = ("--cluster", str(path), *U_WORDS, "--global-batch-size", "4", "--vtp-data-parallel-size", "1")
    without, best = (printed(capsys, "search", *words, *more)["best"][0] for more in ((), (SPLIT,)))
    assert best["step_s"] < without["step_s"] == best["whole_step_s"]
    assert SPLIT in best["flags"] and "--vtp-schedule" not in best["flags"]
    simulated = printed(capsys, "simulate", U_WORDS[0], *words[-4:-2], *best["flags"])
    assert simulated["num_microbatches"] == 4 and SPLIT in simulated["schedule"]["why"]


def test_a_fit_says_whether_split_backwards_gain(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--have", "2,2,1", "--global-batch-size", "8", "--vtp-data-parallel-size", "1")
    without, allowed = printed(capsys, "plan", *words), printed(capsys, "plan", *words, SPLIT)
    assert allowed["fit"]["step"] < without["fit"]["step"] and allowed["fit"]["sizes"] == without["fit"]["sizes"]
    assert f"takes {allowed['fit']['step']:.6g}, {without['fit']['step']:.6g} without" in allowed["fit"]["reasons"][-1]
    simulated = printed(capsys, "simulate", *words, SPLIT)
    assert simulated["step"] == pytest.approx(allowed["fit"]["step"])
    for plan, is_split in ((without, False), (allowed, True)):
        commands = " ".join(command for node in plan["launch"]["nodes"] for command in node["commands"])
        assert commands.count(f"--vtp-schedule planned {SPLIT}") == len(plan["launch"]["nodes"]) * is_split
        assert commands.count(SPLIT) == len(plan["launch"]["nodes"]) * is_split
    # One stage waits for nobody.
    alone = printed(capsys, "plan", *words[2:], "--have", "4", "--vtp-stages", "1:1", SPLIT)
    assert "gains nothing" in alone["fit"]["reasons"][-1]
    assert not any(SPLIT in command for node in alone["launch"]["nodes"] for command in node["commands"])


def test_a_layout_is_found_that_is_good_only_with_split_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    """Without them it is slower than the best layout, by more than what any other is looked at for."""
    words = ("--cluster", CLUSTER, "--num-best", "1")
    without, allowed = (printed(capsys, "search", *words, *more)["best"][0] for more in ((), (SPLIT,)))
    assert allowed["sizes"] != without["sizes"]
    assert allowed["step_s"] < 0.95 * without["step_s"] and allowed["whole_step_s"] > 1.01 * without["step_s"]
