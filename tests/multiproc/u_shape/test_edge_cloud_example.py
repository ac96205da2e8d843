"""The launch scripts of examples/edge_cloud, as a user starts them: two launchers, two working directories."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.rules.doc_commands import commands
from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT
from tests.support.pool import free_port

pytestmark = [pytest.mark.full, pytest.mark.needs("our_example"), pytest.mark.needs("scripts_here")]


def _printed(site: str) -> list[str]:
    """Give the commands of the guide for a site: on one machine, and on two."""
    found = [each for each in commands(ROOT / "docs" / "edge-cloud.md") if each.words[0].endswith(f"cloud/{site}.sh")]
    return [" ".join((*each.variables, *each.words)) for each in found]


def _run(folder: Path, steps: int, *, which: int) -> dict[str, str]:
    """Start both sites at once by the commands of the guide, in whose folder they stand; return what each printed."""
    known = environment(STEPS=steps, MASTER_PORT=free_port(), EDGE_DIR=folder / "edge", CLOUD_DIR=folder / "cloud")
    sites = ("edge", "cloud")
    logs = {site: folder / f"{site}-{steps}.log" for site in sites}
    processes = {}
    for site in sites:
        with logs[site].open("w") as log:
            # The addresses are those of the reader's network.
            command = _printed(site)[which].replace("10.8.0.1", "127.0.0.1").replace("=wg0", "=lo")
            processes[site] = subprocess.Popen(
                ["bash", "-c", command], env=known, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
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
    first = _run(tmp_path, steps=3, which=0)
    second = _run(tmp_path, steps=5, which=1)
    steps = [re.findall(r"iteration +(\d+)/ .* lm loss: ", printed["edge"]) for printed in (first, second)]
    assert steps == [["1", "2", "3"], ["4", "5"]]
    assert not any("lm loss" in printed["cloud"] for printed in (first, second))
    assert [path.name for path in (tmp_path / "cloud").iterdir()] == ["checkpoint"]
    lines = [json.loads(line) for line in (tmp_path / "edge" / "audit.rank0.jsonl").read_text().splitlines()]
    assert {line["cargo"] for line in lines if "cargo" in line} == {"activation", "gradient", "warm-up"}
