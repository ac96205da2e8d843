"""The generated files of docs/ say what the code says now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_docs import stale
from tests.hosts import PYTHON_PATH
from tests.import_rules import ROOT


@pytest.mark.needs("documents_of_0_19")
def test_generated_docs_are_fresh() -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "scripts/make_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=600, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_missing_or_changed_file_is_stale(tmp_path: Path) -> None:
    texts = {"same.md": "text\n", "changed.md": "text\n", "line-ends.md": "text\n", "missing.md": "text\n"}
    (tmp_path / "same.md").write_bytes(b"text\n")
    (tmp_path / "changed.md").write_bytes(b"other text\n")
    (tmp_path / "line-ends.md").write_bytes(b"text\r\n")
    assert stale(texts, tmp_path) == ["changed.md", "line-ends.md", "missing.md"]
