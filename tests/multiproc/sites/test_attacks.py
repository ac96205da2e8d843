"""From a rank of the other site: what it sends ends the run with one line, and does nothing else.

Each attack is tried a second time without its guard, and works.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.attacks import ATTACKER, ESCAPES, LONG_BYTES, MARKER
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments
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
