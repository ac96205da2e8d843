"""The power may fail at any point while Megatron itself saves: what the disk holds then is whole, or is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import EXAMPLE, arguments
from tests.multiproc.faults.kill_trial import FORMATS
from tests.support.hosts import PYTHON_PATH
from tests.support.pool import ENVIRONMENT, HOST, free_port
from tests.support.power_loss import STRACE, Disk, problems_of, read_log, why_not

INNER = "made/here"
# Marks what is saved, once Megatron's function has returned.
SCRIPT = """
import os, runpy, sys
import vtp_plugin

root, script = sys.argv[1:3]
sys.argv = sys.argv[2:]
vtp_plugin.apply()
from megatron.training import checkpointing, training


def save_checkpoint(iteration, *args, **kwargs):
    checkpointing.save_checkpoint(iteration, *args, **kwargs)  # looked up now: the plugin replaces it later
    os.makedirs(f"{root}/saved_{iteration}", exist_ok=True)


training.save_checkpoint = save_checkpoint
runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.needs("scripts_here")
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("form", [form for form in FORMATS if form != "background"])
def test_what_megatron_writes_is_synced(tmp_path: Path, form: str) -> None:
    """Its own writes and syncs, and ours, of two saves of one rank, with every file that they make."""
    root = tmp_path / "root"
    root.mkdir()
    words = [*FORMATS[form], "--train-iters", "2", "--save", str(root / INNER), "--save-interval", "1", "--vtp-force"]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    command = [*STRACE, "--seccomp-bpf", "-o", str(tmp_path / "log"), sys.executable, "-c", SCRIPT, str(root), EXAMPLE]
    done = subprocess.run(
        [*command, *arguments("1", extra=words)],
        env={**os.environ, **ENVIRONMENT, **rank, "PYTHONPATH": PYTHON_PATH},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    disk = Disk(read_log((tmp_path / "log").read_text(errors="replace").splitlines(), root), root)
    saved = [op.path for op in disk.ops if op.kind == "mkdir" and "/saved_" in op.path]
    assert [path.rpartition("_")[2] for path in saved] == ["1", "2"]
    assert sum(op.count for op in disk.ops if op.kind == "write") > 100_000  # the model is among them
    assert problems_of(disk, INNER) == []
    assert disk.unsynced() == set()
