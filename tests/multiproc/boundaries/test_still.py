"""A load or a save in which ranks wait for ever ends within the timeout; one that only takes long goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments
from tests.support.lines import error_line
from tests.support.pace import pace

pytestmark = pytest.mark.needs("scripts_here")

TIMEOUT_S = 6.0


@pytest.mark.parametrize(
    ("where", "hook", "extra"),
    [
        pytest.param("the save of iteration 2", "sleep_in_save", ["--save", "{}", "--save-interval", "2"], id="save"),
        pytest.param("the load of a checkpoint", "sleep_in_load", ["--load", "{}"], id="load", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_sleeps_ends_all(scripts: Scripts, tmp_path: Path, where: str, hook: str, extra: list[str]) -> None:
    """All ranks end, name the one that does not come, and say in which collective they wait for it."""
    if hook == "sleep_in_load":
        scripts.train("1,2", ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"])
    timeout_s = TIMEOUT_S * pace()
    command = arguments("1,2", extra=[*(word.format(tmp_path) for word in extra), "--vtp-timeout-s", str(timeout_s)])
    runs = scripts.launch(3, {"arguments": command, "hooks": [hook], "timeout_s": 15.0 + 2 * timeout_s})
    for rank, run in enumerate(runs):
        assert run.exit_code == 1, run.output[-3000:]
        line = error_line(run.output)
        reason = rf"{where} stood still for ([\d.]+) s: rank 1 does nothing, and the others wait"
        found = re.search(rf"{reason}(?:; this rank stood in (.*))?", line)
        assert found and float(found[1]) < timeout_s, line
        # A rank whose connection breaks before it has read this ends with that, and reads this afterwards.
        if not re.search(r"failed with the error above|lost a connection", line):
            assert (found[2] or "").startswith(f"{where}, in "), line
            assert ("distributed_c10d.py" in line) == (rank != 1), line


def test_a_save_that_takes_longer_than_the_timeout_goes_on(scripts: Scripts, tmp_path: Path) -> None:
    """The others wait for a rank that works."""
    extra = ["--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2"]
    extra += ["--vtp-timeout-s", str(TIMEOUT_S * pace())]
    command = arguments("1,2", extra=extra)
    scripts.finish(3, {"arguments": command, "hooks": ["work_in_save"]})
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
