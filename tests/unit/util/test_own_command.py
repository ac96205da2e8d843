"""Messages advise a command by the name that works where they are read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from vtp_plugin.util.text import own_command


def test_the_script_is_named_where_it_is_on_the_path_and_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("ours", "theirs", "empty"):
        (tmp_path / folder).mkdir()
    for folder in ("ours", "theirs"):
        script = tmp_path / folder / "vtp"
        script.write_text("#!/bin/sh\n")
        script.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "ours") if name == "scripts" else "")
    for path, command in (
        ("ours", "vtp"),
        ("link", "vtp"),
        ("theirs", "python -m vtp_plugin"),
        ("empty", "python -m vtp_plugin"),
    ):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        assert own_command() == command, path
