"""examples/core_only.py, as a user starts it: unequal stages print the losses of the uniform list."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import PYTHON_PATH, ROOT
from tests.pool import ENVIRONMENT

STEP = re.compile(r"^step (\d+)  loss (\S+)  gradient norm (\S+)$", re.MULTILINE)


def _losses_and_norms(processes: dict[str, subprocess.Popen[str]], logs: dict[str, Path]) -> dict[str, list[float]]:
    for sizes, process in processes.items():
        assert process.wait(timeout=600) == 0, f"{sizes}: {logs[sizes].read_text()[-3000:]}"
    found = {sizes: STEP.findall(log.read_text()) for sizes, log in logs.items()}
    for sizes, steps in found.items():
        assert [number for number, _, _ in steps] == ["1", "2", "3"], f"{sizes}: {logs[sizes].read_text()[-3000:]}"
    return {sizes: [float(value) for step in steps for value in step[1:]] for sizes, steps in found.items()}


def test_unequal_stages_print_what_the_uniform_list_prints(tmp_path: Path) -> None:
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    processes: dict[str, subprocess.Popen[str]] = {}
    logs = {sizes: tmp_path / f"{sizes}.log" for sizes in ("1,1", "1,2")}
    try:
        for sizes, log in logs.items():
            world = str(sum(map(int, sizes.split(","))))
            command = [*launcher, world, "examples/core_only.py", "--sizes", sizes, "--steps", "3"]
            with log.open("w") as stream:
                processes[sizes] = subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, text=True
                )
        values = _losses_and_norms(processes, logs)
    finally:
        for process in processes.values():
            process.terminate()
    assert values["1,2"] == pytest.approx(values["1,1"], rel=1e-5)
    assert values["1,1"][0] == pytest.approx(5.58, abs=0.3)  # about ln 256, so it did compute something
