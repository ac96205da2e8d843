"""What crosses between two sites: to the byte what the plan says; a slow link shows as exposed time."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.multiproc.cases.script_cases import Scripts
from vtp_plugin.cli import main
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout

pytestmark = pytest.mark.needs("scripts_here")

SHAPE = (12, 2, 64)  # sequence, microbatch and hidden size of the example
NUM_MICROBATCHES = 4
LINK_DELAY_S = 0.05  # of multiproc/hooks/delays.py, which imports Megatron
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1", "--vtp-sites", "edge,cloud"]
# Given costs: the run measures no links in its first steps.
COSTS = ["--vtp-costs", "forward_ms=4,8,4", "--vtp-replan-share", "inf"]
LINE = re.compile(
    r"\[vtp rank (\d)\] (edge|cloud): sent ([\d,]+) bytes, received ([\d,]+) bytes(?: at ([\d.]+) Mbit/s)?"
)


def planned_bytes() -> dict[str, int]:
    """Return what each site sends in a step, by the plans of the boundaries that cross sites."""
    layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    sent = {"edge": 0, "cloud": 0}
    for boundary in pipeline_boundaries(layout, is_ring=True, rules=TransportRules(sites=("edge", "cloud"))):
        for direction in Direction:
            plan = boundary.channel(direction).plan(SHAPE)
            for transfer in plan.transfers:
                num_elements = sum(math.prod(stop - start for start, stop in box) for box in transfer.boxes)
                sent["edge" if transfer.src == 0 else "cloud"] += NUM_MICROBATCHES * 4 * num_elements
    return sent


def test_bytes_are_those_of_the_plan_and_a_slow_link_is_exposed(
    scripts: Scripts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = planned_bytes()
    # Four tensors cross for each microbatch: two activations and two gradients, each way one of both.
    assert planned == dict.fromkeys(("edge", "cloud"), NUM_MICROBATCHES * 2 * 4 * math.prod(SHAPE))
    seen: dict[str, dict[str, float]] = {}
    for name, hooks in (("fast", []), ("slow", ["slow_link"])):
        folder = tmp_path / name
        told = ["--vtp-timing", "--tensorboard-dir", str(folder), "--vtp-trace", str(folder / "trace")]
        told += ["--vtp-trace-steps", "2-4"]
        runs = scripts.train("1,2", [*U_SHAPE, *COSTS, *told], hooks=hooks)
        for run, rank in zip(runs[:2], "01", strict=True):
            lines = [line for line in LINE.findall(run.output) if line[0] == rank]
            assert [line[1] for line in lines] == ["cloud", "edge"] * 4, "each site's first rank, at every step"
            for _, site, sent, received, _ in lines:
                other = "edge" if site == "cloud" else "cloud"
                assert (int(sent.replace(",", "")), int(received.replace(",", ""))) == (planned[site], planned[other])
        assert not LINE.findall(runs[2].output)
        events = EventAccumulator(str(folder))
        events.Reload()
        tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("vtp sites/")}
        assert {f"vtp sites/{site} {what} (bytes)" for site in planned for what in ("sent", "received")} <= tags
        assert [one.value for one in events.Scalars("vtp sites/edge sent (bytes)")] == [planned["edge"]] * 4
        capsys.readouterr()
        main(["trace", str(folder / "trace"), "--json"])
        sites = {one["site"]: one for one in json.loads(capsys.readouterr().out)["sites"]}
        assert {site: one["sent_bytes"] for site, one in sites.items()} == planned
        assert all(one["num_resent"] is not None and one["num_resent"] >= 0 for one in sites.values())
        seen[name] = {
            "exposed": sites["edge"]["exposed_ms"]["0"],
            "on_way": sites["edge"]["on_way_ms"]["0"] + sites["cloud"]["on_way_ms"]["1"],
        }
        if name == "slow":
            # Each tensor is under way for 50 ms at least, of which the other side can hide a part.
            most_mbit = 8e-6 * 4 * math.prod(SHAPE) * NUM_MICROBATCHES * 2 / LINK_DELAY_S
            assert all(0 < one["goodput_mbit"] < most_mbit for one in sites.values()), sites
            main(["trace", str(folder / "trace")])
            assert f"edge: sent {planned['edge']:,} bytes" in capsys.readouterr().out
    # The edge waits at least for the first microbatch's way to the cloud and back, less what it computes meanwhile. On
    # a loaded machine the fast one waits as long, for the cloud to compute: what is under way tells the two apart.
    assert seen["slow"]["exposed"] > 1e3 * LINK_DELAY_S, seen
    assert seen["slow"]["on_way"] > seen["fast"]["on_way"] + 1e3 * LINK_DELAY_S, seen


def test_a_plain_pipeline_counts_all_that_its_audit_has(scripts: Scripts, tmp_path: Path) -> None:
    """The tied embedding as well, which crosses after the last backward."""
    told = ["--vtp-timing", "--vtp-audit", str(tmp_path / "audit.jsonl")]
    runs = scripts.train("1,2", ["--vtp-sites", "edge,cloud", *told])
    found = {site: (sent, received) for _, site, sent, received, _ in LINE.findall(runs[0].output)[-2:]}
    rows = [json.loads(line) for line in (tmp_path / "audit.rank0.jsonl").read_text().splitlines()]
    # Before the first step links are warmed up, and the copies of the embedding get one value.
    start = next(number for number, row in enumerate(rows) if row.get("cargo") == "activation")
    crossed = {
        way: sum(row["bytes"] for row in rows[start:] if "place" in row and row["way"] == way)
        for way in ("sent", "received")
    }
    assert {row["cargo"] for row in rows[start:] if "place" in row} >= {"activation", "gradient", "tied embedding"}
    assert found["edge"] == tuple(f"{crossed[way] // 4:,}" for way in ("sent", "received"))
    assert found["cloud"] == found["edge"][::-1]


def test_one_site_says_nothing_of_sites(scripts: Scripts, tmp_path: Path) -> None:
    runs = scripts.train("1,2", ["--vtp-timing", "--vtp-trace", str(tmp_path)])
    assert "time of the step of iteration 4" in runs[0].output and "between sites" not in runs[0].output
    for rank in range(3):
        text = (tmp_path / f"rank{rank}.jsonl").read_text()
        assert not any(word in text for word in ('"site"', '"network"', "num_resent")), text[:300]
