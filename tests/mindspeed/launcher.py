"""Starts a training script under torchrun, as a user would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.hosts import ROOT


def launch(
    script: Path | str,
    words: Sequence[str],
    *,
    num_ranks: int,
    is_run: bool,
    environment: Mapping[str, str],
    timeout_s: float,
) -> tuple[int, str]:
    """Start a script on all ranks and return how it ended and what it wrote.

    Args:
        script: path of the script.
        words: its arguments.
        num_ranks: processes on this machine.
        is_run: start it by ``python -m vtp_plugin run``, else as it is.
        environment: variables besides this process's own.
        timeout_s: longest time.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    done = subprocess.run(
        [*launcher, *(["-m", "vtp_plugin", "run"] if is_run else []), str(script), *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    return done.returncode, done.stdout + done.stderr
