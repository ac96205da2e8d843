"""The generated files of docs/ say what the code says now."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_docs import stale
from tests.rules.import_rules import ROOT
from tests.support.pool import run_code


@pytest.mark.needs("documents_of_0_19")
def test_generated_docs_are_fresh() -> None:
    run_code(f"""
        import contextlib, io, runpy, sys
        sys.argv, said = ["make_docs.py", "--check"], io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                runpy.run_path({str(ROOT / "scripts" / "make_docs.py")!r}, run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, (ended.code, said.getvalue())
        """)


def test_missing_or_changed_file_is_stale(tmp_path: Path) -> None:
    texts = {"same.md": "text\n", "changed.md": "text\n", "line-ends.md": "text\n", "missing.md": "text\n"}
    (tmp_path / "same.md").write_bytes(b"text\n")
    (tmp_path / "changed.md").write_bytes(b"other text\n")
    (tmp_path / "line-ends.md").write_bytes(b"text\r\n")
    assert stale(texts, tmp_path) == ["changed.md", "line-ends.md", "missing.md"]
