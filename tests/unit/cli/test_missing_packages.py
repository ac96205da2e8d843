"""Commands without a package that they need: one line, exit code 2, and what to install."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import PYTHON_PATH, ROOT
from vtp_plugin.cli import main

torch = pytest.importorskip("torch")

# As Python does where a package is not there; each command in a process of its own, which was forked.
WITHOUT = """
import os, sys
from vtp_plugin.cli import main
package, *commands = sys.argv[1:]
sys.modules[package] = None
if package == "numpy":
    import torch  # once for all, which would each do it first
for command in commands:
    sys.stdout.flush()
    if os.fork() == 0:
        main(command.split())
        os._exit(0)
    _, status = os.wait()
    sys.stderr.flush()
    print("ended with", os.waitstatus_to_exitcode(status), flush=True)
"""


def ends(package: str, *commands: str, cwd: Path) -> list[tuple[str, int]]:
    """Return what each command writes where a package is missing, and its exit code."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, *commands],
        cwd=cwd,
        env={"PYTHONPATH": PYTHON_PATH, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=True,
    )
    found = re.findall(r"(.*?)^ended with (-?\d+)\n", done.stdout, re.DOTALL | re.MULTILINE)
    assert len(found) == len(commands), done.stdout
    return [(text, int(code)) for text, code in found]


NEEDS_TORCH = {
    "import": "--hf model --to new",
    "export": "--from start --hf new --like model",
    "diff": "start start",
    "reshard": "--from start --to new",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small checkpoint."""
    from tests.support.checkpoints import by_name, make_model

    by_name(tmp_path / "start", make_model())
    (tmp_path / "model").mkdir()
    return tmp_path


def test_a_missing_package_is_one_line_and_exit_code_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 of ``diff`` says that something differs."""
    commands = [f"checkpoint {action} {words}" for action, words in NEEDS_TORCH.items()]
    commands += ["profile --out times.toml --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
                 "--max-position-embeddings 64 --micro-batch-size 1 --vocab-size 256"]  # fmt: skip
    for (text, code), command in zip(ends("torch", *commands, cwd=folder), commands, strict=True):
        name = " ".join(command.split()[:2]) if command.startswith("checkpoint") else "profile"
        assert code == 2 and text.count("\n") == 1, text
        assert text.startswith(f"vtp_plugin: error: {name}: torch cannot be imported (")
        assert text.endswith("; the command needs it; pip install 'torch>=2.6,<3'\n")
    assert sorted(path.name for path in folder.iterdir()) == ["model", "start"]
    # What it tells to install is here: then the command answers.
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "diff", str(folder / "start"), str(folder / "start")])
    assert left.value.code == 0 and "equal to the last bit" in capsys.readouterr().out


def test_commands_that_need_no_torch_go_on_without_it(folder: Path) -> None:
    commands = ["checkpoint show start", "checkpoint verify start", "plan --vtp-size-list 1,2", "checkpoint --help"]
    assert [code for _, code in ends("torch", *commands, cwd=folder)] == [0] * len(commands)


def test_the_tools_need_no_numpy(folder: Path) -> None:
    commands = ["checkpoint diff start start", "checkpoint reshard --from start --to new"]
    assert [code for _, code in ends("numpy", *commands, cwd=folder)] == [0, 0]


def test_only_pages_need_jinja2(tmp_path: Path) -> None:
    """What is missing is said before a search begins, and other results come without it."""
    cluster = ROOT / "examples/clusters/unequal.toml"
    pages = ["plan --vtp-size-list 1,2 --output a.html", "simulate --vtp-size-list 1,2 --output b.html",
             f"search --cluster {cluster} --output c.html", "trace . --output d.html"]  # fmt: skip
    for (text, code), command in zip(ends("jinja2", *pages, cwd=tmp_path), pages, strict=True):
        name = command.split()[0]
        assert (code, text.count("\n")) == (2, 1) and text.startswith(f"vtp_plugin: error: {name}: jinja2 cannot be")
        assert text.endswith("; the command needs it; pip install 'vtp-plugin[report]'\n")
    others = ["plan --vtp-size-list 1,2", "simulate --vtp-size-list 1,2 --output b.svg"]
    assert [code for _, code in ends("jinja2", *others, cwd=tmp_path)] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]


def test_import_without_safetensors(folder: Path) -> None:
    """It says which extra brings it."""
    published = pytest.importorskip("tests.support.hf_models", reason="transformers is not here")
    (folder / "model").rmdir()
    published.make(published.KINDS["llama-3"], folder / "model", **published.SMALL)
    ((text, code),) = ends("safetensors", "checkpoint import --hf model --to new", cwd=folder)
    assert code == 2 and text.count("\n") == 1 and text.endswith("pip install 'vtp-plugin[hf]'\n")
    commands = ["checkpoint import --hf model --to new", "checkpoint export --from new --hf back"]
    assert [code for _, code in ends("numpy", *commands, cwd=folder)] == [0, 0]  # nor do they need numpy


@pytest.mark.parametrize("error", [ValueError("a bug"), PermissionError(13, "Permission denied", "some file")])
def test_a_crash_is_no_answer(
    error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is a file that cannot be read."""
    from vtp_plugin.checkpoint.format.contents import Contents

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Contents, "weights", fail)
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", "diff", str(folder / "start"), str(folder / "start")])
    said = capsys.readouterr().err
    assert left.value.code == 2
    if isinstance(error, OSError):
        assert said.startswith("vtp_plugin: error: some file cannot be read or written: Permission denied; ")
        assert said.endswith("; see to its access\n")
    else:
        assert "Traceback" in said and said.endswith("ValueError: a bug\n")
