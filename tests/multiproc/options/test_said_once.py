"""What all ranks of a machine end with is said once, by its first rank, before torchrun's own lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import EXAMPLE, arguments
from tests.support.hosts import PYTHON_PATH
from tests.support.pace import pace
from tests.support.pool import ENVIRONMENT, forked_python, free_port

pytestmark = pytest.mark.needs("scripts_here")

# Words behind those of a run that is right, the status, and what is said.
CASES = {
    "a flag": (["--vtp-transprt", "rank0"], 2, "--vtp-transprt is unknown; do you mean --vtp-transport?"),
    "the number of processes": (["--vtp-size-list", "2,2"], 2, "needs 4 processes, or a multiple of 4; this run has 3"),
    "a size of the model": (
        ["--num-attention-heads", "7", "--kv-channels", "8"],
        1,
        "--num-attention-heads 7: stage 1 has TP 2, which does not divide it",
    ),
    "a flag of Megatron's": (
        ["--num-layrs", "4"],
        2,
        "unrecognized arguments: --num-layrs 4; do you mean --num-layers?",
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.full] if "Megatron" in case else []) for case in CASES]
)
def test_an_error_is_said_once(tmp_path: Path, case: str) -> None:
    extra, status, text = CASES[case]
    # The launcher is forked; its ranks are interpreters that it starts.
    done = forked_python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"),
        *("-m", "vtp_plugin", "run", EXAMPLE, *arguments("1,2", extra=extra)),
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH},
    )
    output = done.stdout + done.stderr
    ours = [line for line in output.splitlines() if re.match(r"\[vtp|vtp_plugin:", line)]
    assert len(ours) == 1 and text in ours[0], output
    assert re.match(r"(?:\[vtp rank 0\]|vtp_plugin:) error: ", ours[0])
    # Once more in torchrun's summary, as the root cause. Torchrun ends all ranks once one has ended.
    assert output.count(text) == 2, output
    cause = output.rpartition("Root Cause")[2]
    assert re.search(r"rank +: 0 ", cause) and text in cause, output
    assert set(re.findall(r"exitcode +: (\S+) ", output)) <= {str(status), "-15"}, output
    assert "before that" not in output and "any boundary" not in output and "usage:" not in output


def test_a_run_without_sizes_says_so(tmp_path: Path) -> None:
    """Else nothing of the plugin would be printed, and a forgotten flag would go unseen."""
    script = tmp_path / "script.py"
    script.write_text("print('trained')")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH}
    texts = {}
    for words in ((), ("--vtp-size-list", "1,2")):
        done = forked_python("-m", "vtp_plugin", "run", str(script), *words, env=environment)
        assert (done.returncode, done.stdout) == (0, "trained\n")
        texts[words] = done.stderr.count("no --vtp-size-list: Megatron runs as it is")
    assert list(texts.values()) == [1, 0]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_node_alone_with_an_error_ends_the_others(tmp_path: Path, number: int) -> None:
    """Two nodes of one rank each, one of them with a misspelt flag: the other has no reason of its own to end."""
    port, agents = free_port(), []
    for node in range(2):
        words = arguments("1,1", extra=["--vtp-force", *(["--vtp-transprt", "rank0"] if node == number else [])])
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
            *("--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("-m", "vtp_plugin", "run", EXAMPLE, *words),
        ]
        with (tmp_path / f"node {node}").open("w") as log:
            environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH}
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log))
    try:
        assert [agent.wait(120 * pace()) for agent in agents] == [1, 1]
    finally:
        for agent in agents:
            agent.kill()
    own, other = ((tmp_path / f"node {node}").read_text() for node in (number, 1 - number))
    reason = "--vtp-transprt is unknown; do you mean --vtp-transport?"
    assert f"vtp_plugin: error: {reason}" in own
    assert f"[vtp rank {1 - number}] error: rank {number}: " in other and "ConfigError" in other, other
