"""No example or script removes or overwrites what it did not make."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import PYTHON_PATH, ROOT

EXAMPLES = ROOT / "examples"
# What removes, renames or overwrites; the first two look at what is there before.
REMOVING = re.compile(r"rmtree|unlink|\brm -|os\.remove|\.rename\(|write_text|IndexedDatasetBuilder")
GUARDED = {"own_folder.py", "make_dataset.py", "edge_cloud_mm/write_model.py"}


def said(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run an example that must end with a line; return it."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={"PYTHONPATH": PYTHON_PATH, "PATH": "/usr/bin:/bin", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode not in (0, -6) and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr.splitlines()[-1]


def begin(folder: Path) -> str:
    """Let an example begin in a folder; return what it says where it does not."""
    code = f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
    code += f"from pathlib import Path; from own_folder import begin; begin(Path({str(folder)!r}), 'a.py')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_only_three_files_write_where_something_may_be() -> None:
    """The others start torchrun, or write below a folder that they have begun."""
    files = [path for path in EXAMPLES.rglob("*") if path.suffix in (".py", ".sh", ".sbatch", ".yaml")]
    found = {str(path.relative_to(EXAMPLES)) for path in files if REMOVING.search(path.read_text())}
    assert found == GUARDED


def test_a_folder_is_replaced_only_where_the_example_made_it(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert begin(folder) == "" and [path.name for path in folder.iterdir()] == [".made-by-a.py"]
    (folder / "result").touch()
    assert begin(folder) == "" and not (folder / "result").exists()
    (folder / ".made-by-a.py").unlink()
    (folder / "precious").touch()
    assert "holds something else; only a folder with .made-by-a.py is replaced" in begin(folder)
    assert (folder / "precious").exists()
    (tmp_path / "file").touch()
    assert "holds something else" in begin(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert "holds something else" in begin(tmp_path / "link")
    (tmp_path / "empty").mkdir()
    assert begin(tmp_path / "empty") == ""


def test_an_output_is_not_overwritten(tmp_path: Path) -> None:
    model, output = tmp_path / "model.json", tmp_path / "output.json"
    for path in (model, output):
        path.write_text("{}")
    words = ("--vision", "[[1]]", "--text", "[[1]]", "--output", output)
    assert said(EXAMPLES / "edge_cloud_mm" / "write_model.py", model, *words).startswith(f"{output} exists; ")
    assert output.read_text() == "{}"


@pytest.mark.needs("scripts_here")
def test_a_dataset_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "text.bin").write_bytes(b"precious")
    line = said(EXAMPLES / "make_dataset.py", tmp_path / "text", "--max-bytes", "100000")
    assert line.startswith(f"{tmp_path}/text.bin exists; ")
    assert [path.name for path in tmp_path.iterdir()] == ["text.bin"]


@pytest.mark.needs("bridges")
def test_mimo_says_how_many_ranks_its_sizes_take() -> None:
    assert said(EXAMPLES / "mimo" / "train.py") == "1 ranks; these sizes take 1 and 2; start 3"


def test_make_clean_leaves_what_users_trained() -> None:
    text = (ROOT / "Makefile").read_text()
    (removed,) = re.findall(r"^\trm -rf (.*)$", text, re.MULTILINE)
    assert "out" not in removed.split() and "out/demo" in removed.split()
