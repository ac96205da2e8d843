"""The launch scripts of examples/edge_cloud, as a user starts them: two launchers, two working directories."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import PYTHON_PATH, ROOT
from tests.pool import free_port

pytestmark = [pytest.mark.full, pytest.mark.needs("our_example"), pytest.mark.needs("scripts_here")]


def _run(folder: Path, steps: int) -> dict[str, str]:
    """Start both sites at once and return what each printed."""
    known = {"PYTHON": sys.executable, "PYTHONPATH": PYTHON_PATH, "STEPS": str(steps), "MASTER_PORT": str(free_port())}
    known |= {"EDGE_DIR": str(folder / "edge"), "CLOUD_DIR": str(folder / "cloud"), "GLOO_SOCKET_IFNAME": "lo"}
    sites = ("edge", "cloud")
    logs = {site: folder / f"{site}-{steps}.log" for site in sites}
    processes = {}
    for site in sites:
        with logs[site].open("w") as log:
            command = ["bash", str(ROOT / "examples" / "edge_cloud" / f"{site}.sh")]
            processes[site] = subprocess.Popen(
                command, env=os.environ | known, stdout=log, stderr=subprocess.STDOUT, cwd=folder
            )
    try:
        codes = {site: process.wait(timeout=600) for site, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
    printed = {site: log.read_text() for site, log in logs.items()}
    assert codes == {"edge": 0, "cloud": 0}, printed["edge"][-3000:] + printed["cloud"][-3000:]
    return printed


def test_two_sites_train_save_and_resume(tmp_path: Path) -> None:
    first = _run(tmp_path, steps=3)
    second = _run(tmp_path, steps=5)
    steps = [re.findall(r"iteration +(\d+)/ .* lm loss: ", printed["edge"]) for printed in (first, second)]
    assert steps == [["1", "2", "3"], ["4", "5"]]
    assert not any("lm loss" in printed["cloud"] for printed in (first, second))
    assert [path.name for path in (tmp_path / "cloud").iterdir()] == ["checkpoint"]
    lines = [json.loads(line) for line in (tmp_path / "edge" / "audit.rank0.jsonl").read_text().splitlines()]
    assert {line["cargo"] for line in lines if "cargo" in line} == {
        "activation",
        "gradient",
        "shape header",
        "warm-up",
    }
