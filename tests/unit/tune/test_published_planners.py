"""`benchmarks.published` reads a checkout in the format of Sailor's artifact: here a small one, made up by the test."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import published
from benchmarks.published_cluster import KINDS, ask, read_artifact, read_cluster
from benchmarks.published_ours import samples_per_s
from benchmarks.published_plans import plan_of, read_plan, show_plan
from benchmarks.published_quoted import CLUSTERS, QUOTED
from benchmarks.published_richer import Richer
from benchmarks.published_theirs import Theirs
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import SearchProblem

NUM_LAYERS = 6  # the embedding and the head among them
PARAMS = {1: 1000, 2: 500}
# A simulator of the test's own: a sample of a layer takes its time, the slowest stage counts.
SIMULATOR = """
import pathlib
import pandas, torch
from sailor.Planner.simulations import told

class Simulator:
    def __init__(self, path, training, llm_info, fp16, profiles, zone):
        assert (pathlib.Path(path) / "sailor/sailor/providers").is_dir() and not fp16 and zone == "here"
        self.training, self.info, self.profiles = training, llm_info["toy"], profiles["toy"]

    def check_config_fits(self, plan):
        print("a lot")
        return plan["mbs"] < 4

    def simulate_iteration_time(self, plan):
        told.plans.append(plan)
        (pipeline,) = plan["pipeline_list"]
        stages = []
        for layers, replicas in zip(pipeline["layers_per_stage"], pipeline["tmp_per_stage"]):
            for [(kind, number, zone)], tp in replicas:
                assert number == tp and zone == "here"
                rows = self.profiles[kind][str(plan["mbs"])][str(tp)]
                stages.append(sum(rows[str(layer)][0] + rows[str(layer)][1] for layer in layers))
        told.held = [self.info["1"][str(layer)]["act_mem_floats"] for layer in range(self.training["num_all_layers"])]
        count = -(-self.training["global_batch_size"] // (plan["mbs"] * pipeline["dp"][0]))
        return max(stages) * count, 0.0, {}
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout: a layer takes 10 and 20 ms for a sample on the new cards, three times as long on the old ones."""

    def row(pace: float, size: int, tp: int, layer: int) -> list[float]:
        whole = 0.0 if layer == 0 else size * pace / tp
        return [0.010 * whole, 0.020 * whole, 1e-6 * pace]

    def rows(pace: float, size: int, tp: int) -> dict[str, Any]:
        return {str(layer): row(pace, size, tp, layer) for layer in range(NUM_LAYERS)}

    profiles = {
        kind: {str(size): {str(tp): rows(pace, size, tp) for tp in (1, 2)} for size in (1, 2, 4)}
        for kind, pace in zip(KINDS, (1.0, 3.0), strict=True)
    }
    del profiles[KINDS[1]]["4"]["1"]
    held = {
        str(tp): {
            str(layer): {"params_floats": params, "act_output_floats": 2048, "act_mem_floats": 100}
            for layer in range(NUM_LAYERS)
        }
        for tp, params in PARAMS.items()
    }
    rate = {kind: {str(number): [[2.0 * number], 2e9] for number in (1, 2)} for kind in KINDS}
    files: dict[str, Any] = {
        "Planner/simulations/profiles_tmp.json": {"toy": profiles},
        "Planner/llm_info.json": {"toy": held},
        "Planner/simulations/configs/basic_cluster_config.json": {
            **{kind: {"gpus_per_node": 2, "mem_per_gpu": 1} for kind in KINDS},
            "zone": "here",
        },
        "Planner/simulations/configs/training_config_opt_350.json": {
            "global_batch_size": 32,
            "hidden_size": 64,
            "sequence_length": 32,
            "num_layers": NUM_LAYERS - 2,
            "vocab_size": 128,
            "model": "toy",
            "optimizer": "Adam",
            "heads": 4,
            "max_position_embeddings": 32,
            "num_all_layers": NUM_LAYERS,
        },
        "providers/multizone_bandwidths_het.json": {
            "here": {kind: {str(number): {"here": rate} for number in (1, 2)} for kind in KINDS}
        },
    }
    for name, content in files.items():
        path = tmp_path / "sailor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    (tmp_path / "sailor/Planner/simulations/runtime_simulator.py").write_text(SIMULATOR)
    (tmp_path / "sailor/Planner/simulations/told.py").write_text("plans, held = [], []\n")
    return tmp_path


@pytest.fixture
def problem(root: Path) -> SearchProblem:
    artifact = read_artifact(root)
    return ask(artifact, read_cluster(artifact, (2, 2))).problem


def test_times_links_and_memory_are_as_the_files_say(problem: SearchProblem) -> None:
    assert {(split.num_replicas, split.micro_batch_size) for split in problem.splits} == {
        (replicas, size) for replicas in (1, 2, 4) for size in (1, 2, 4, 8)
    }
    split = next(one for one in problem.splits if (one.num_replicas, one.micro_batch_size) == (1, 4))
    new, old = split.pools
    # Of what was not timed nothing is made up.
    assert sorted(new.speeds) == [1, 2]
    assert sorted(old.speeds) == [2]
    assert not any(pool.speeds for one in problem.splits if one.micro_batch_size == 8 for pool in one.pools)
    assert old.speeds[2].forward_s == pytest.approx([0.06] * 4)
    assert (old.speeds[2].first_s, old.speeds[2].last_s) == ((0.0, 0.0), pytest.approx((0.06, 0.12)))
    assert old.speeds[2].source == "measured"
    assert split.message_bytes == 4 * 32 * 64 * 4
    assert (new.between.bytes_per_s, new.between.latency_s, new.between.at_once) == (pytest.approx(2e9), 0.0, 2)
    assert new.memory_bytes == 40 << 30
    # Their rule: 24 bytes of a weight, 4 of a number, and 2 GB, with several cards 3 GB.
    assert split.held_bytes is not None
    assert split.held_bytes(HeldPart(1, 1, 0, 2, True, False, 3)) == 3 * 24 * 1000 + 3 * 3 * 4 * 4 * 100 + 2 * 10**9
    assert split.held_bytes(HeldPart(2, 1, 3, 4, False, True, 1)) == 2 * 24 * 500 + 2 * 4 * 4 * 100 + 3 * 10**9


def test_a_plan_is_judged_as_the_search_judges_its_own(root: Path, problem: SearchProblem) -> None:
    artifact = read_artifact(root)
    best = find_best(problem).best[0]
    assert samples_per_s(artifact, problem, plan_of(best)) == pytest.approx(32 / best.step_s)
    alone = samples_per_s(artifact, problem, read_plan("mbs 2: 6 on 1 A100-40"))
    assert alone is not None
    assert 32 / alone == pytest.approx(16 * 5 * 0.060, rel=0.01)
    # Each replica runs its own microbatches: the old cards share each layer, and are slower by a half.
    both = samples_per_s(artifact, problem, read_plan("mbs 2: 6 on 1 A100-40 + 1 V100-16 tp 2"))
    assert both is not None
    assert 32 / both == pytest.approx(8 * 5 * 0.090, rel=0.01)
    # Ten microbatches of three do not share 32 samples evenly: eleven.
    three = samples_per_s(artifact, problem, read_plan("mbs 1: 6 on 3 A100-40"))
    assert three is not None
    assert 32 / three == pytest.approx(11 * 5 * 0.030, rel=0.01)
    assert samples_per_s(artifact, problem, read_plan("mbs 4: 6 on 1 V100-16")) is None


@pytest.fixture
def theirs(root: Path) -> Iterator[Theirs]:
    with Theirs.of(root, read_artifact(root)) as found:
        yield found
    assert not any(name.partition(".")[0] == "sailor" for name in sys.modules)


def test_their_simulator_is_asked_in_its_words(theirs: Theirs) -> None:
    assert theirs.samples_per_s(read_plan("mbs 4: 6 on 1 A100-40")) is None
    assert theirs.samples_per_s(read_plan("mbs 1: 2 on 2 V100-16 > 4 on 2 A100-40")) == pytest.approx(32 / (16 * 0.12))
    told = sys.modules["sailor.Planner.simulations.told"]
    assert told.plans[-1]["pipeline_list"][0]["layers_per_stage"] == [[0, 1], [2, 3, 4, 5]]
    # Half as many replicas run twice as large microbatches, and keep twice as much of each.
    assert theirs.samples_per_s(read_plan("mbs 1: 2 on 2 V100-16 > 4 on 1 A100-40")) == pytest.approx(32 / (16 * 0.24))
    assert told.held == [100, 100, 200, 200, 200, 200]


def test_the_table(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["published", "--sailor", str(root), "--cards", "2+2"])
    published.main()
    rows = [row.strip("| ").split(" | ") for row in capsys.readouterr().out.splitlines()]
    assert [row[1] for row in rows[2:]] == ["ours", "stock Megatron, by our search", "a richer search"]
    assert float(rows[2][2]) > 0 < float(rows[2][3])
    assert show_plan(read_plan(rows[2][5])) == rows[2][5]


def test_the_richer_search_gives_stages_replicas_of_their_own(root: Path) -> None:
    """Two old cards take two thirds of the time of one if they share a layer, half of it if they share samples."""
    path = root / "sailor/Planner/simulations/profiles_tmp.json"
    profiles = json.loads(path.read_text())
    # The two new cards are best together: stages of one replica.
    for kind, tp, factor in ((KINDS[0], "1", 100), (KINDS[1], "1", 0.6), (KINDS[1], "2", 0.8)):
        for rows in profiles["toy"][kind].values():
            for row in rows.get(tp, {}).values():
                row[:2] = [factor * row[0], factor * row[1]]
    path.write_text(json.dumps(profiles))
    artifact = read_artifact(root)
    problem = ask(artifact, read_cluster(artifact, (2, 2))).problem
    richer = Richer(artifact, problem)
    assert {split.num_replicas for split in richer.problem.splits} == {1, 2, 3, 4}
    best, other = find_best(problem).best[0], find_best(richer.problem).best[0]
    plan = richer.plan_of(other)
    assert not plan.has_equal_replicas, show_plan(plan)
    judged, known = samples_per_s(artifact, problem, plan), samples_per_s(artifact, problem, plan_of(best))
    assert judged is not None
    assert known is not None
    assert judged > known
    assert judged == pytest.approx(32 / other.step_s, rel=0.01)
    # The fuller of both ways counts: one sample and all weights, or both samples, half of the weights and 1 GB more.
    split = next(one for one in richer.problem.splits if (one.num_replicas, one.micro_batch_size) == (2, 2))
    assert split.held_bytes is not None
    assert split.held_bytes(HeldPart(2, 2, 1, 2, False, False, 1)) == 24 * 500 + 8 * 100 + 3 * 10**9


def test_plans_that_are_quoted_are_whole() -> None:
    assert {quoted.counts for quoted in QUOTED} == {*CLUSTERS}
    for quoted in QUOTED:
        plan = read_plan(quoted.plan)
        assert show_plan(plan) == quoted.plan
        assert {sum(stage.layers for stage in stages) for stages in plan.pipelines} == {26}
        for kind, count in zip(KINDS, quoted.counts, strict=True):
            replicas = [each for stages in plan.pipelines for stage in stages for each in stage.replicas]
            assert sum(each.tp for each in replicas if each.kind == kind) <= count
