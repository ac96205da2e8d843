"""What torchrun's summary says of a rank that ended with a line of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.hosts import PYTHON_PATH
from tests.support.pool import free_port
from vtp_plugin.runtime.health.redaction import write_error_file


def test_the_first_line_counts_and_a_consequence_is_later(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    environment = {"TORCHELASTIC_ERROR_FILE": str(path)}
    write_error_file("the cause", is_consequence=False, environment=environment)
    write_error_file("something else", is_consequence=False, environment=environment)
    message = json.loads(path.read_text())["message"]
    assert message["message"] == message["extraInfo"]["py_callstack"] == "the cause"
    assert abs(int(message["extraInfo"]["timestamp"]) - time.time()) < 5
    other = {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "other.json")}
    write_error_file("after that", is_consequence=True, environment=other)
    later = json.loads((tmp_path / "other.json").read_text())["message"]["extraInfo"]["timestamp"]
    assert int(later) > int(message["extraInfo"]["timestamp"])


def test_without_a_launcher() -> None:
    write_error_file("nobody reads it", is_consequence=False, environment={})


def test_torchrun_shows_our_line(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import vtp_plugin\nvtp_plugin.apply(vtp_size_list='1,x')\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"),
            *(f"--master-port={free_port()}", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    summary = done.stderr.rpartition("Root Cause")[2]
    assert "vtp_size_list '1,x' has the entry 'x'" in summary, done.stderr[-3000:]
    assert "error_file: <N/A>" not in summary
