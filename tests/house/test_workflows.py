"""What runs on GitHub and before a commit is what runs here: targets of the Makefile, hosts, ranges of versions."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from scripts import coverage_by_package
from tests.rules.import_rules import ROOT
from vtp_plugin.host.versions import HOSTS

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Megatron brings")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
HOOKS = ROOT / ".pre-commit-config.yaml"


def jobs(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())["jobs"]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_job_is_one_target_with_a_limit_and_a_cache(path: Path) -> None:
    for name, job in jobs(path).items():
        [command] = commands(job)
        program, target, *variables = command.replace("${{ matrix.host }}", "HOST").split()
        assert program == "make" and re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"{name}: {command}"
        assert all(re.search(rf"^{word.partition('=')[0]} :=|\$\({word.partition('=')[0]}\)", MAKEFILE, re.MULTILINE)
                   for word in variables), command  # fmt: skip
        assert job["timeout-minutes"] <= 360  # GitHub's own limit
        assert any(step.get("with", {}).get("cache") == "pip" for step in job["steps"]), name


def test_smoke_comes_first() -> None:
    [first, *others] = jobs(ROOT / ".github" / "workflows" / "test.yml").items()
    assert commands(first[1]) == ["make smoke"]
    assert {job["needs"] for _, job in others} == {"smoke"}


@pytest.mark.parametrize(("workflow", "target"), [("test.yml", "test"), ("full.yml", "test-full")])
def test_all_hosts_are_in_the_matrix_with_their_python(workflow: str, target: str) -> None:
    found = jobs(ROOT / ".github" / "workflows" / workflow).values()
    [job] = [job for job in found if commands(job) == [f"make {target} HOST=${{{{ matrix.host }}}}"]]
    rows = {row["host"]: row["python"] for row in job["strategy"]["matrix"]["include"]}
    assert rows == {host.name: host.pythons[0] for host in HOSTS}


def test_hooks_have_the_range_of_ruff_that_the_project_has() -> None:
    hooks = [hook for repo in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repo["hooks"]]
    [wanted] = re.findall(r'"(ruff[^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert {hook["additional_dependencies"][0] for hook in hooks if hook["id"].startswith("ruff")} == {wanted}


@pytest.mark.parametrize(("subject", "is_short"), [("x" * 72, True), ("x" * 73, False), ("x\n\n" + "y" * 80, True)])
def test_the_hook_measures_the_subject(subject: str, is_short: bool) -> None:
    """As pre-commit's pygrep does it: the pattern is looked for in the whole message, and must not be found."""
    hooks = {hook["id"]: hook for repo in yaml.safe_load(HOOKS.read_text())["repos"] for hook in repo["hooks"]}
    hook = hooks["commit-subject"]
    assert (hook["args"], hook["stages"]) == (["--multiline"], ["commit-msg"])
    assert (re.search(hook["entry"], subject, re.MULTILINE | re.DOTALL) is None) == is_short


def test_coverage_is_counted_by_package() -> None:
    found = doctest.testmod(coverage_by_package)
    assert found.attempted > 0 and not found.failed
