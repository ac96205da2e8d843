"""The command line, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vtp_plugin
from tests.import_rules import ROOT
from tests.lines import error_line
from vtp_plugin.boundary.draw import draw_pipeline
from vtp_plugin.boundary.pipeline import TransportRules
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.options import RULES, VTP_FLAGS, Flag
from vtp_plugin.schedule import draw_svg, plan_u_shape, simulate, u_costs
from vtp_plugin.schedule.stated import COST_KEYS

U = ("--schedule", "u", "--num-stages", "3", "--num-microbatches", "8")
SCRIPT = """\
import sys
import beside
assert __name__ == "__main__"
print(beside.WORD, sys.argv)
"""


def run_cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without accelerators, so that --device cpu is allowed everywhere.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "vtp_plugin", *arguments],
        cwd=cwd,
        env={**os.environ, **hidden, "PYTHONPATH": str(ROOT)},
        timeout=600,
        check=False,
        capture_output=True,
        text=True,
    )


def output_of(*arguments: str, cwd: Path) -> str:
    done = run_cli(*arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def error_of(*arguments: str, cwd: Path) -> str:
    """Return the only line of a refusal."""
    done = run_cli(*arguments, cwd=cwd)
    assert done.returncode == 2 and done.stdout == "", (done.returncode, done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    return line


def test_version(tmp_path: Path) -> None:
    assert output_of("--version", cwd=tmp_path) == f"vtp_plugin {vtp_plugin.__version__}\n"


def test_plan_shows_layout_and_crossings(tmp_path: Path) -> None:
    assert output_of("plan", "--vtp-size-list", "1,2,2", "--world-size", "10", cwd=tmp_path) == (
        "stage  tp  cp  dp  ranks  leaders\n"
        "    0   1   1   2  0-1    0-1\n"
        "    1   2   1   2  2-5    2,4\n"
        "    2   2   1   2  6-9    6,8\n"
        "world size 10, rank order tp-cp-dp-pp, writer rank 9\n"
        "boundary 0->1, forward, replica dp 0 cp 0: sliced (the stages' sizes differ: every link carries its share)\n"
        "  0 -> 2 [0:2, 0:1, 0:1]\n"
        "  0 -> 3 [2:4, 0:1, 0:1]\n"
        "  all-gather in (2, 3)\n"
        "boundary 0->1, forward, replica dp 1 cp 0: sliced (the stages' sizes differ: every link carries its share)\n"
        "  1 -> 4 [0:2, 0:1, 0:1]\n"
        "  1 -> 5 [2:4, 0:1, 0:1]\n"
        "  all-gather in (4, 5)\n"
        "boundary 1->2, forward, replica dp 0 cp 0: sliced (both stages have one size: rank to rank)\n"
        "  2 -> 6 [0:4, 0:1, 0:1]\n"
        "  3 -> 7 [0:4, 0:1, 0:1]\n"
        "boundary 1->2, forward, replica dp 1 cp 0: sliced (both stages have one size: rank to rank)\n"
        "  4 -> 8 [0:4, 0:1, 0:1]\n"
        "  5 -> 9 [0:4, 0:1, 0:1]\n"
    )


def test_plan_joins_the_replicas_where_context_parallelism_differs(tmp_path: Path) -> None:
    output = output_of("plan", "--vtp-size-list", "2,1", "--vtp-cp-list", "1,2", cwd=tmp_path)
    assert "world size 4" in output
    assert "boundary 0->1, forward, replica dp 0, all cp ranks: sliced (context-parallel sizes differ)" in output
    assert output.count(" -> ") == 4


@pytest.mark.parametrize(
    ("mode", "line"),
    [
        ("multiplex", "boundary 0->1, replica dp 0->1 cp 0, forward: sliced"),
        ("split", "boundary 0->1, forward, replica dp 0->0+1 cp 0: sliced"),
    ],
)
def test_plan_joins_stages_of_different_data_parallel_sizes(tmp_path: Path, mode: str, line: str) -> None:
    output = output_of("plan", "--vtp-size-list", "1,2", "--vtp-dp-list", "1,2", "--vtp-dp-mode", mode, cwd=tmp_path)
    assert line in output and "world size 5" in output


def test_plan_takes_the_leaders_between_sites(tmp_path: Path) -> None:
    output = output_of("plan", "--vtp-size-list", "1,2,2", "--vtp-sites", "edge,cloud,cloud", cwd=tmp_path)
    assert output.splitlines()[-6:] == [
        "boundary 0->1, forward, replica dp 0 cp 0: rank0 (crosses from site edge to site cloud)",
        "  0 -> 1 [0:4, 0:1, 0:1]",
        "  broadcast in (1, 2)",
        "boundary 1->2, forward, replica dp 0 cp 0: sliced (both stages have one size: rank to rank)",
        "  1 -> 3 [0:4, 0:1, 0:1]",
        "  2 -> 4 [0:4, 0:1, 0:1]",
    ]


def test_draw_writes_the_picture_that_the_flags_ask_for(tmp_path: Path) -> None:
    flags = ("--ring", "--vtp-transport", "rank0", "--output", "picture.svg")
    assert output_of("draw", "--vtp-size-list", "2,2", *flags, cwd=tmp_path) == "wrote picture.svg\n"
    layout = PipelineLayout.from_sizes((2, 2), world_size=4)
    assert (tmp_path / "picture.svg").read_text() == draw_pipeline(
        layout, is_ring=True, rules=TransportRules(transport="rank0")
    )


def test_simulate_shows_the_chosen_u_and_why(tmp_path: Path) -> None:
    *rows, summary, reason, head, edge, first, last = output_of(
        "simulate", *U, "--latency", "1", "--limit", "6", cwd=tmp_path
    ).splitlines()
    assert len(rows) == 3 and rows[0].startswith("stage 0 |0") and rows[1].startswith("stage 1 |....1F0")
    # The last cloud stage works 8 * 6 without a pause; 1 + 1 + 2 pass before, 4 + 1 + 2 after.
    assert summary == "step 59, bubble 18.6 %"
    costs = u_costs(3, latency=1.0)
    plan = plan_u_shape(3, 8, costs, limits=(6, 6, 6))
    assert reason == plan.reason and head == "stage  in flight  peak activations of its chunks"
    kept = simulate(plan.schedule, costs).activations
    assert [line.split() for line in (edge, first, last)] == [
        ["0", str(plan.in_flight[0]), f"{kept[0]},", str(kept[3])],
        ["1", str(plan.in_flight[1]), str(kept[1])],
        ["2", str(plan.in_flight[2]), str(kept[2])],
    ]


@pytest.mark.parametrize(
    ("flags", "step"),
    [
        # The last stage works 4 * 3, 1 + 0.5 before and 0.5 + 2 after, and waits 1 for its third microbatch.
        (("1f1b", "--num-stages", "2", "--latency", "0.5"), "17"),
        # The last stage works 4 * 9, 1 before and 2 after.
        (("1f1b", "--num-stages", "2", "--cloud", "3"), "39"),
        # The last stage works 4 * 2 * 3, 1 before and 2 after.
        (("interleaved", "--num-stages", "2"), "27"),
    ],
)
def test_simulate_takes_times_in_units_of_the_edge(tmp_path: Path, flags: tuple[str, ...], step: str) -> None:
    output = output_of("simulate", "--num-microbatches", "4", "--schedule", *flags, cwd=tmp_path)
    assert f"step {step}, " in output and "U-shaped" not in output


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        ("multiplex", [["0", "3", "3"], ["1", "replica", "0", "1", "1"], ["1", "replica", "1", "1", "1"]]),
        ("split", [["0", "2", "2"], ["1", "1", "1"]]),
    ],
)
def test_simulate_knows_replicas(tmp_path: Path, mode: str, rows: list[list[str]]) -> None:
    """Sizes 2 and 4: two copies, each with two replicas of stage 1 that run a microbatch in the time of stage 0."""
    flags = ("--schedule", "1f1b", "--num-stages", "2", "--num-microbatches", "4", "--vtp-dp-list", "2,4")
    lines = output_of("simulate", *flags, "--vtp-dp-mode", mode, cwd=tmp_path).splitlines()
    # In both modes stage 0 works 4 * 3, and waits 1 for its first gradient.
    assert lines[len(rows)] == "step 13, bubble 7.7 %"
    assert [line.split() for line in lines[-len(rows) :]] == rows


def test_simulate_writes_a_picture_or_a_trace(tmp_path: Path) -> None:
    assert output_of("simulate", *U, "--output", "step.svg", cwd=tmp_path) == "wrote step.svg\n"
    timeline = simulate(plan_u_shape(3, 8, u_costs(3)).schedule, u_costs(3))
    title = "u-shape, 3 stages, 8 microbatches, latency 0"
    assert (tmp_path / "step.svg").read_text() == draw_svg(timeline, title=title)
    assert output_of("simulate", *U, "--output", "step.json", cwd=tmp_path) == "wrote step.json\n"
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    # Four chunks, forward and backward.
    assert len([event for event in events if event["ph"] == "X"]) == 8 * 4 * 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("plan", "--vtp-size-list", "1,x"), "'1,x' has the entry 'x', which is not a positive whole number"),
        (("plan", "--vtp-size-list", "2,0"), "'2,0' has the entry '0', which is not a positive whole number"),
        (("plan", "--vtp-size-list", "auto"), "auto needs a running launcher"),
        (("plan", "--vtp-size-list", "1,2", "--world-size", "0"), "the world size must be a positive integer, got 0"),
        (("plan", "--vtp-size-list", "1,2", "--world-size", "4"), "which does not divide the world size 4"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-transport", "tcp"), "transport 'tcp' is unknown"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-sites", "edge"), "'edge' names 1 sites, the size list has 2 stages"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-sites", "edge,"), "'edge,' has an empty name"),
        (("plan", "--vtp-size-list", "1,2", "--vtp-cp-list", "1"), "vtp_cp_list 1 has 1 entries, the size list has 2"),
        (
            ("plan", "--vtp-size-list", "1,2", "--vtp-cp-list", "1,2", "--vtp-transport", "rank0"),
            "boundary 0->1 joins context-parallel sizes 1 and 2, which only slices can cross",
        ),
        (("draw", "--vtp-size-list", "1,-2", "--output", "x.svg"), "'-2', which is not a positive whole number"),
        (("draw", "--vtp-size-list", "1,2", "--output", "absent/x.svg"), "--output absent/x.svg cannot be written"),
        (("simulate", *U, "--schedule", "2f2b"), "--schedule '2f2b' is unknown; use one of 1f1b, interleaved, u"),
        (("simulate", *U, "--schedule", "1f1b", "--limit", "2"), "--limit 2: the order of 1f1b is fixed"),
        (("simulate", *U, "--limit", "0"), "in-flight limits (0, 0, 0): no microbatch could ever start"),
        (("simulate", *U, "--num-stages", "1"), "a U-shaped pipeline of 1 stage"),
        (("simulate", *U, "--num-stages", "-1"), "a U-shaped pipeline of -1 stage"),
        (("simulate", *U, "--latency", "-1"), "latency (-1.0, 0.0, -1.0): every entry must be finite and not negative"),
        (("simulate", *U, "--vtp-dp-list", "1,2"), "--vtp-dp-list 1,2 has 2 entries: 3 stages need one each"),
        (("simulate", *U, "--vtp-dp-list", "1,3,3"), "8 microbatches for 3 replicas of stage 1: 8 mod 3 = 2 must be 0"),
        (("simulate", *U, "--vtp-dp-list", "1,3,3", "--vtp-dp-mode", "split"), "3 at once run as one, and 8 mod 3 = 2"),
        (
            ("simulate", *U, "--schedule", "interleaved", "--vtp-dp-list", "1,2,2"),
            "stages of unequal data parallelism have one chunk",
        ),
        (("simulate", *U, "--output", "x.png"), "--output x.png: the name must end in .svg (picture) or .json (trace)"),
        (("simulate", *U, "--output", "absent/x.svg"), "--output absent/x.svg cannot be written"),
        (("doctor", "--device", "tpu"), "device 'tpu' is unknown; use one of auto, cuda, npu, cpu"),
        (("run", "absent.py", "--help"), "script absent.py does not exist; give the path of the training script"),
        (("run", "."), "script . does not exist"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: tuple[str, ...], line: str) -> None:
    error = error_of(*arguments, cwd=tmp_path)
    assert error.startswith("vtp_plugin: error: ") and line in error


def test_run_gives_the_script_its_arguments_and_its_neighbours(tmp_path: Path) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "beside.py").write_text("WORD = 'neighbour'\n")
    # The same name in the working directory must not win.
    (tmp_path / "beside.py").write_text("WORD = 'stranger'\n")
    arguments = ["scripts/train.py", "--help", "--vtp-size-list", "1,2", "--version"]
    output = output_of("run", *arguments, cwd=tmp_path)
    assert f"neighbour {arguments}" in output.splitlines()
    assert "usage" not in output


def test_run_shows_the_help_of_a_script_with_megatrons_parser(tmp_path: Path) -> None:
    """One of Megatron 0.19's help texts has a percent sign that argparse cannot format."""
    (tmp_path / "train.py").write_text("from megatron.training.arguments import parse_args\nparse_args()\n")
    output = " ".join(output_of("run", "train.py", "--help", cwd=tmp_path).split())
    assert "(e.g. 1.10 = 10%)" in output and "default 100%" in output and "100%%" not in output
    assert all(flag.name in output and group_title(flag) in output for flag in VTP_FLAGS)
    assert all(f"{name} ({key.unit})" in output for name, key in COST_KEYS.items())


def group_title(flag: Flag) -> str:
    return f"{flag.group.value}:"


def test_run_reports_the_error_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from vtp_plugin.errors import ConfigError\nraise ConfigError('no such size')\n")
    done = run_cli("run", "train.py", cwd=tmp_path)
    assert done.returncode == 1
    assert error_line(done.stderr).endswith("error: no such size") and "Traceback" not in done.stderr


def test_doctor_shows_versions_platform_patches_and_options(tmp_path: Path) -> None:
    output = output_of("doctor", "--device", "cpu", cwd=tmp_path)
    first, second, third, *_ = lines = output.splitlines()
    assert first.startswith(f"vtp_plugin {vtp_plugin.__version__}, torch ") and ", megatron-core " in first
    assert second == "platform: cpu, backend gloo (requested)"
    applied = [line.split()[0] for line in lines if line.split()[1:2] == ["applied"]]
    assert third == f"patches: {len(applied)} of {len(applied)} applied, then reverted"
    assert {"H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8", "H9", "P1", "P2", "P3"} <= set(applied)
    assert all(f"    {rule.option}" in lines for rule in RULES)
