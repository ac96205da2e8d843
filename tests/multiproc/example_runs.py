"""Examples of training scripts, started as a user does."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.hosts import PYTHON_PATH, ROOT
from tests.pool import ENVIRONMENT

STEP = re.compile(r"^step (\d+)  loss (\S+)  gradient norm (\S+)$", re.MULTILINE)
NUM_STEPS = 3


def run_example(script: str, num_ranks: int, words: str, *, is_refused: bool = False) -> str:
    """Run a script on so many ranks for three steps; return what it prints, or where it is refused its errors."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*launcher, script, *words.split(), "--steps", str(NUM_STEPS)],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode != 0) is is_refused, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stderr if is_refused else done.stdout
