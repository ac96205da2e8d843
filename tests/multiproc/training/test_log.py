"""What a run says: who says it, that the plugin is active, and that each site sees its iterations."""

from __future__ import annotations

import re

import pytest

import vtp_plugin
from tests.multiproc.cases.script_cases import Scripts
from tests.support.hosts import ROOT
from tests.support.lines import warnings
from tests.support.pool import Pool
from vtp_plugin.util import log

pytestmark = pytest.mark.needs("scripts_here")

ACTIVE = re.compile(
    rf"^\[vtp rank (\d+)\] vtp_plugin {re.escape(vtp_plugin.__version__)}: 3 ranks, TP sizes 1,2(; .*)?$", re.MULTILINE
)
DIGEST = re.compile(r"^\[vtp rank \d+\] digest ([0-9a-f]{8}):", re.MULTILINE)


def own_lines(output: str) -> list[str]:
    """Return the plugin's lines."""
    return [line for line in output.splitlines() if line.startswith("[vtp")]


def test_each_site_of_a_u_sees_that_the_plugin_is_active_and_its_iterations(scripts: Scripts) -> None:
    u_shape = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,2", "--vtp-sites", "edge,cloud"]
    edge, leader, other = (run.output for run in scripts.train("1,2", u_shape))
    found = ACTIVE.findall(edge + leader + other)
    assert [rank for rank, _ in found] == ["0", "1"], "one rank of each site says it once"
    assert "rank 0 writes the log" in edge and "lm loss" in edge
    assert re.search(r"layers  ranks  leaders\n.* 1\+2  0      0\n.* 1  1-2    1\n", edge)
    for output in (edge, leader):
        assert re.search(r"^\[vtp rank \d\] done: 4 steps, median ", output, re.MULTILINE)
    assert not own_lines(other)
    iterations = re.findall(r"^\[vtp rank 1\] (iteration \d+/4 \| .*)$", leader, re.MULTILINE)
    assert len(iterations) == 4, leader
    for line in iterations:
        assert re.fullmatch(r"iteration \d/4 \| elapsed time per iteration \(ms\): \d+\.\d", line)
    assert "[vtp rank 0] iteration" not in edge, "Megatron prints the edge's line"
    assert all(len(line) <= log.WIDTH for output in (edge, leader) for line in own_lines(output))


def test_details_come_from_every_rank_and_warnings_leave_the_summary_out(scripts: Scripts) -> None:
    for level, ranks in (("DEBUG", ["0", "1", "2"]), ("WARNING", [])):
        outputs = [run.output for run in scripts.train("1,2", ["--vtp-log-level", level, "--train-iters", "1"])]
        assert [rank for rank, _ in ACTIVE.findall("\n".join(outputs))] == ranks
        digests = DIGEST.findall("\n".join(outputs))
        assert len(digests) == len(ranks) and len(set(digests)) <= 1, "they agreed on one thing"


@pytest.mark.parametrize(("options", "speakers"), [({}, [0]), ({"sites": ["edge", "cloud"]}, [0, 1])], ids=str)
def test_megatron_core_alone_says_it_too(pool: Pool, options: dict[str, object], speakers: list[int]) -> None:
    outputs: list[str] = pool.run(3, "tests.multiproc.jobs.variants:start_and_listen", {"sizes": (1, 2), **options})
    assert [rank for rank, output in enumerate(outputs) if ACTIVE.search(output)] == speakers
    assert all(bool(own_lines(output)) == (rank in speakers) for rank, output in enumerate(outputs))


@pytest.mark.full
def test_a_script_without_a_command_line_says_once_what_depends_on_the_sizes(scripts: Scripts) -> None:
    command = {"script": str(ROOT / "examples" / "core_only.py"), "arguments": ["--sizes", "1,2", "--steps", "3"]}
    runs = scripts.finish(3, {**command, "how": "plain", "hooks": ["drop_hidden"]})
    said = [warnings(run.output) for run in runs]
    assert [len(lines) for lines in said] == [1, 0, 0]
    assert said[0][0].startswith("--hidden-dropout 0.1 with --vtp-size-list 1,2; every rank draws masks")
