"""The launch scripts of examples/edge_cloud, as a user starts them: two launchers, two working directories."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.multiproc.cases.example_runs import start_sites
from tests.rules.doc_commands import commands
from tests.rules.launcher_commands import environment
from tests.support.hosts import ROOT
from tests.support.pool import free_port

pytestmark = [pytest.mark.full, pytest.mark.needs("our_example"), pytest.mark.needs("scripts_here")]


def _printed(site: str) -> list[str]:
    """Give the commands of the guide for a site: on one machine, and on two."""
    found = [
        each for each in commands(ROOT / "docs/guides/edge-cloud.md") if each.words[0].endswith(f"cloud/{site}.sh")
    ]
    return [" ".join((*each.variables, *each.words)) for each in found]


def _run(folder: Path, steps: int, *, which: int) -> dict[str, str]:
    """Start both sites by the commands of the guide; return what each printed."""
    known = environment(STEPS=steps, MASTER_PORT=free_port(), EDGE_DIR=folder / "edge", CLOUD_DIR=folder / "cloud")
    # The addresses are those of the reader's network.
    texts = {site: _printed(site)[which].replace("10.8.0.1", "127.0.0.1") for site in ("edge", "cloud")}
    shells = {site: ["bash", "-c", text.replace("=wg0", "=lo")] for site, text in texts.items()}
    return start_sites(folder, shells, dict.fromkeys(shells, known))


def test_two_sites_train_save_and_resume(tmp_path: Path) -> None:
    first = _run(tmp_path, steps=3, which=0)
    second = _run(tmp_path, steps=5, which=1)
    steps = [re.findall(r"iteration +(\d+)/ .* lm loss: ", printed["edge"]) for printed in (first, second)]
    assert steps == [["1", "2", "3"], ["4", "5"]]
    assert not any("lm loss" in printed["cloud"] for printed in (first, second))
    assert [path.name for path in (tmp_path / "cloud").iterdir()] == ["checkpoint"]
    lines = [json.loads(line) for line in (tmp_path / "edge" / "audit.rank0.jsonl").read_text().splitlines()]
    assert {line["cargo"] for line in lines if "cargo" in line} == {"activation", "gradient", "warm-up"}
