"""Examples of training scripts: in forks of processes that have imported Megatron already, or as a user starts them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, succeeded
from tests.support.hosts import ROOT
from tests.support.pool import start_python

STEP = re.compile(r"^step (\d+)  loss (\S+)  gradient norm (\S+)$", re.MULTILINE)
NUM_STEPS = 3
CORE_ONLY = "examples/core_only.py"


def run_example(scripts: Scripts, script: str, num_ranks: int, words: str) -> str:
    """Run a script on so many ranks for three steps; return what all print, one after another."""
    return "".join(run.output for run in succeeded(_launch(scripts, script, num_ranks, words)))


def refuse_example(scripts: Scripts, script: str, num_ranks: int, words: str) -> list[str]:
    """Run a script that must end badly on every rank; return what each rank prints."""
    runs = _launch(scripts, script, num_ranks, words)
    assert all(run.exit_code not in (0, None) for run in runs), [(run.exit_code, run.output[-3000:]) for run in runs]
    return [run.output for run in runs]


def _launch(scripts: Scripts, script: str, num_ranks: int, words: str) -> list[ScriptRun]:
    arguments = [*words.split(), "--steps", str(NUM_STEPS)]
    return scripts.launch(num_ranks, {"script": str(ROOT / script), "arguments": arguments, "how": "plain"})


def start_example(script: str, num_ranks: int, words: str) -> str:
    """Start a script by torchrun, as a user does; return what it prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return start_python(*launcher, script, *words.split(), "--steps", str(NUM_STEPS))


def start_sites(
    folder: Path,
    commands: Mapping[str, Sequence[str | Path]],
    environments: Mapping[str, Mapping[str, str]],
    *,
    timeout_s: float = 600.0,
) -> dict[str, str]:
    """Start the commands of all sites at once, each with a launcher of its own; return what each printed.

    Args:
        folder: where what they print is kept.
        commands: command of each site; all must end well.
        environments: environment of each site.
        timeout_s: for all of them.
    """
    logs = {site: folder / f"{site}.log" for site in commands}
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for site, command in commands.items():
            with logs[site].open("w") as log:
                started[site] = subprocess.Popen(
                    command, env=environments[site], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
                )
        codes = {site: process.wait(timeout=timeout_s) for site, process in started.items()}
    finally:
        for process in started.values():
            process.terminate()
    printed = {site: log.read_text() for site, log in logs.items()}
    assert not any(codes.values()), (codes, [text[-4000:] for text in printed.values()])
    return printed


def losses_and_norms(printed: str) -> list[float]:
    """Read the numbers that a script prints of its three steps."""
    steps = STEP.findall(printed)
    assert [number for number, _, _ in steps] == ["1", "2", "3"], printed[-3000:]
    return [float(value) for step in steps for value in step[1:]]
