"""`megatron sft` of ms-swift on unequal stages: losses, norms and exported weights are those of `1,1`.

The core that CI runs; `test_swift_grid.py` has the rest. Transformer Engine is stood in for, everything runs on CPUs.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.rules.doc_commands import commands
from tests.support.hosts import ROOT
from tests.swift.runs import DOOR, Done, Run, assert_alike, assert_same_export, environment, free_port, run_all
from vtp_plugin.patches.swift import known_swift

SP = {"sequence_parallel": "true"}
KEPT = {"save_steps": "3", "no_save_optim": "false", "no_save_rng": "false"}
CORE = (
    Run(name="uniform", sizes=(1, 1), words={"save_safetensors": "true"}),
    Run(name="unequal", sizes=(1, 2), words={**SP, **KEPT, "save_safetensors": "true"}),
)


@pytest.fixture(scope="module")
def core(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    folder = tmp_path_factory.mktemp("core")
    # ms-swift takes the optimizer out of what it loads where the run itself would not save it.
    resumed = {
        **SP,
        **KEPT,
        "save_steps": "100",
        "finetune": "false",
        "mcore_model": str(folder / "unequal" / "checkpoint-3"),
    }
    return run_all((*CORE, Run(name="resumed", sizes=(2, 1), words=resumed)), models, folder)


def test_losses_and_norms_are_those_of_equal_stages(core: dict[str, Done]) -> None:
    assert_alike(core["unequal"], core["uniform"])


def test_the_exported_weights_are_those_of_equal_stages(core: dict[str, Done], models: Path) -> None:
    assert_same_export(core["unequal"], core["uniform"], models / "qwen2")


def test_another_list_resumes_with_the_optimizer(core: dict[str, Done]) -> None:
    assert_alike(core["resumed"], core["uniform"], first=3)


def test_the_command_of_two_nodes_gives_the_same(core: dict[str, Done], models: Path, tmp_path: Path) -> None:
    # As a user starts it: one command on each node, which reads there how many ranks it has.
    run = Run(name="nodes", sizes=(1, 2), words=SP)
    shared = {**os.environ, **environment(tmp_path, run.sizes), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "NNODES": "2"}
    program = Path(sys.executable).parent / "megatron"
    nodes = [
        subprocess.Popen(
            [str(program), "sft", *run.argv(models, tmp_path)],
            env={**shared, "NODE_RANK": str(node), "NPROC_PER_NODE": str(ranks)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node, ranks in enumerate(run.sizes)
    ]
    texts = [node.communicate(timeout=800)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(text[-3000:] for text in texts)
    assert_alike(Done([0], tmp_path / "nodes"), core["uniform"])


def test_the_command_prints_the_path_of_the_door() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vtp_plugin", "path", "swift"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).resolve() == DOOR.resolve()


def test_the_guide_gives_flags_that_ms_swift_has() -> None:
    package = importlib.util.find_spec("swift")
    assert package is not None and package.origin is not None
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(package.origin).parent.rglob("*args*.py"))
    sources += "".join(path.read_text(encoding="utf-8") for path in Path(package.origin).parent.rglob("*mixin*.py"))
    given = [command.words for command in commands(ROOT / "docs" / "guides" / "ms-swift.md")]
    words = {word for line in given if line[0] == "megatron" for word in line if word.startswith("--")}
    assert len(words) > 8
    assert [word for word in sorted(words) if not re.search(rf"^    {word[2:]}: ", sources, re.MULTILINE)] == []


def test_what_is_installed_is_what_was_run_or_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*known_swift.problems_of_versions(), *known_swift.changes_of_versions()] == []
    monkeypatch.setattr(metadata, "version", {"ms-swift": "4.7.0", "mcore-bridge": "1.6.5"}.get)
    (other,) = known_swift.changes_of_versions()
    assert other == "ms-swift 4.7.0; stages of unequal size were run with ms-swift 4.6.0 only"
    monkeypatch.setattr(known_swift, "TARGETS", {**known_swift.TARGETS, "swift": ("swift.megatron.init:gone",)})
    (missing,) = known_swift.problems_of_versions()
    assert "has no swift.megatron.init:gone; it is of another version than ms-swift 4.6.0, which" in missing
