"""From a rank of the other site: what it sends ends the run with one line, what it saves names nothing.

Each attack is tried a second time without its guard, and works.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.attacks import ATTACKER, ESCAPES, LONG_BYTES, MARKER
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training
from tests.support.hosts import host_name
from tests.support.lines import error_line

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,1,2", "--vtp-sites", "edge,cloud"]
EDGE = 0
PICKLES = {
    "call_system": "is a pickle, or of another version",
    "call_eval": "is a pickle, or of another version",
    "announce_much": f"would be {LONG_BYTES} bytes long; {32 << 20} at most",
    "send_escapes": r"holds the text '\x1b]0;owned\x07\x1b[2J', with characters that a terminal may obey",
}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """A file that is there once somebody runs what the attacker sends; it holds the ranks that did."""
    return tmp_path / MARKER


def _run(scripts: Scripts, marker: Path, hooks: Sequence[str], extra: Sequence[str] = ()) -> list[ScriptRun]:
    command = arguments("1,2", extra=[*U_SHAPE, "--vtp-timeout-s", "200", *extra])
    # The attacker alone starts there.
    return scripts.launch(3, {"arguments": command, "hooks": hooks, "folders": {ATTACKER: str(marker.parent)}})


def _edge_line(runs: Sequence[ScriptRun]) -> str:
    """Give the edge's own error line; it has ended by itself, badly and without a traceback."""
    edge = runs[EDGE]
    assert edge.exit_code not in (0, None), edge.output[-3000:]
    assert "Traceback" not in edge.output, edge.output[-3000:]
    assert error_line(edge.output), edge.output[-3000:]
    return error_line(edge.output)


@pytest.mark.parametrize("attack", PICKLES)
def test_an_object_of_the_other_site_runs_nothing(scripts: Scripts, marker: Path, attack: str) -> None:
    runs = _run(scripts, marker, [attack])
    assert f"an object from another site {PICKLES[attack]}" in _edge_line(runs)
    assert not marker.exists() and not any("\x1b" in run.output for run in runs)


@pytest.mark.parametrize("attack", ["call_system", "call_eval"])
def test_without_the_guard_it_runs(scripts: Scripts, marker: Path, attack: str) -> None:
    _run(scripts, marker, ["without_objects_guard", attack])
    assert str(EDGE) in marker.read_text().split()


def test_without_the_guard_a_length_takes_memory(scripts: Scripts, marker: Path) -> None:
    runs = _run(scripts, marker, ["without_objects_guard", "announce_much"])
    assert [run.exit_code for run in runs] == [0, 0, 0], [run.output[-3000:] for run in runs]
    assert runs[EDGE].facts["longest"] == 3 * LONG_BYTES


HEADER = f"would send torch.float32 [{1 << 40}, 2, 64], {(1 << 40) * 2 * 64} elements; {16 * 12 * 2 * 64} at most"


def test_a_lie_in_a_header_takes_no_memory(scripts: Scripts, marker: Path) -> None:
    assert HEADER in _edge_line(_run(scripts, marker, ["vary_lengths", "lie_in_headers"]))
    control = _run(scripts, marker, ["vary_lengths", "lie_in_headers", "without_bounds_of_headers"])
    assert "memory" in control[EDGE].output and HEADER not in control[EDGE].output, control[EDGE].output[-3000:]


def test_a_text_of_the_other_site_obeys_no_terminal(scripts: Scripts, marker: Path) -> None:
    runs = _run(scripts, marker, ["raise_escapes"], ["--vtp-share-errors"])
    line = _edge_line(runs)
    assert r"rank 1 failed: ValueError: \x1b]0;owned\x07\x1b[2J xxx" in line and len(line) < 3000, line[:300]
    assert "\x1b" not in runs[EDGE].output
    control = _run(scripts, marker, ["raise_escapes", "without_plain_texts"], ["--vtp-share-errors"])
    assert ESCAPES in control[EDGE].output, control[EDGE].output[-3000:]


def test_without_an_attacker_the_run_ends_well(scripts: Scripts, marker: Path) -> None:
    assert [run.exit_code for run in _run(scripts, marker, ["vary_lengths"])] == [0, 0, 0]


EVALUATION = ["--eval-interval", "2", "--eval-iters", "1", "--split", "80,10,10"]
# Megatron 0.12 ends a run of another number of ranks that does not leave the random states of the checkpoint alone.
ELSEWHERE = ["--no-load-rng"] if host_name() == "0.12" else []
SHARDED = ["--use-distributed-optimizer", "--ckpt-fully-parallel-load", "--untie-embeddings-and-output-weights"]
BACKGROUND = ["--async-save"]


@pytest.mark.parametrize(
    ("options", "dp"),
    [
        pytest.param([], 1, id="plain"),
        pytest.param(SHARDED, 2, id="sharded"),
        pytest.param(BACKGROUND, 1, id="background", marks=pytest.mark.full),
    ],
)
def test_a_shared_checkpoint_names_nothing(scripts: Scripts, tmp_path: Path, options: Sequence[str], dp: int) -> None:
    """Saved by two sites whose arguments differ, and loaded by them, in this layout and in another one."""
    folder = str(tmp_path / "saved")
    command = [*EVALUATION, *U_SHAPE, *options, "--ckpt-format", "torch_dist"]
    own = {0: ["--tensorboard-dir", str(tmp_path / "tensorboard")]}
    runs = scripts.train("1,2", [*command, "--save", folder, "--save-interval", "2"], dp=dp, by_rank=own)
    assert "boundary 0->1: rank0 (crosses from site edge to site cloud)" in runs[0].output
    for sizes, flags in (("1,2", []), ("1,1", ELSEWHERE)):
        Path(folder, "latest_checkpointed_iteration.txt").write_text("2")
        again = scripts.train(sizes, [*command, *flags, "--load", folder], dp=dp, by_rank=own)
        assert_same_training(again, runs, first=2)


def test_files_of_each_rank_name_nothing(scripts: Scripts, tmp_path: Path) -> None:
    """Timers of all ranks, and a file of each rank in a folder of each site."""
    folders = {rank: ["--save", str(tmp_path / site)] for rank, site in enumerate(("edge", "cloud", "cloud"))}
    extra = [*EVALUATION, *U_SHAPE, "--ckpt-format", "torch", "--save-interval", "2", "--timing-log-level", "2"]
    scripts.train("1,2", [*extra, "--timing-log-option", "all", "--vtp-timing"], by_rank=folders)
    assert [len([*(tmp_path / site).glob("iter_0000004/mp_rank_*")]) for site in ("edge", "cloud")] == [1, 2]
