"""The file with the key of an edge: who may read it, and what is wrong with it in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from vtp_plugin.checkpoint.save.atomic_dir import (
    EDGE_KEY,
    read_edge_key,
    read_kept_key,
    require_same_key,
    write_edge_key,
)
from vtp_plugin.errors import ConfigError

KEY = b"\x00\xff0123456789abcd"


def _put(path: Path, content: bytes = KEY, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_edge_key(tmp_path / "new", KEY)
    finally:
        os.umask(before)
    file = tmp_path / "new" / EDGE_KEY
    assert [path.stat().st_mode & 0o777 for path in (file, file.parent)] == [0o600, 0o700]
    assert read_kept_key(tmp_path / "new", "--load") == KEY
    number = file.stat().st_ino
    write_edge_key(tmp_path / "new", KEY)
    assert file.stat().st_ino == number, "written again"
    write_edge_key(tmp_path / "new", KEY * 2)
    assert read_kept_key(tmp_path / "new", "--load") == KEY * 2
    assert [*(tmp_path / "new").rglob("*")] == [file.parent, file]


def test_files_that_a_script_opens_to_its_group_stay_closed(tmp_path: Path) -> None:
    """As MindSpeed-LLM does with all files under --save: the key's folder keeps others out."""
    write_edge_key(tmp_path, KEY)
    for folder, _, names in os.walk(tmp_path):
        for name in names:
            Path(folder, name).chmod(0o640)
    assert read_kept_key(tmp_path, "--load") == KEY
    write_edge_key(tmp_path, KEY * 2)
    place = (tmp_path / EDGE_KEY).parent
    place.chmod(0o750)
    with pytest.raises(ConfigError, match=rf"^--load: {place} has mode 0750, .*; chmod 700 {place}$"):
        read_kept_key(tmp_path, "--load")
    write_edge_key(tmp_path, KEY * 2)
    assert read_kept_key(tmp_path, "--load") == KEY * 2


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    elsewhere = _put(tmp_path / "elsewhere", b"other people's")
    place = (tmp_path / EDGE_KEY).parent
    place.symlink_to(tmp_path)
    write_edge_key(tmp_path, KEY)
    assert not place.is_symlink() and [*place.iterdir()] == [tmp_path / EDGE_KEY]
    (tmp_path / EDGE_KEY).unlink()
    (tmp_path / EDGE_KEY).symlink_to(elsewhere)
    write_edge_key(tmp_path, KEY)
    assert elsewhere.read_bytes() == b"other people's"
    assert not (tmp_path / EDGE_KEY).is_symlink() and read_kept_key(tmp_path, "--load") == KEY


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda _: None, r"cannot be read \(No such file or directory\); .*head -c 32", id="missing"),
        pytest.param(lambda path: path.mkdir(), r"cannot be read \(it is a folder\)", id="folder"),
        pytest.param(os.mkfifo, r"cannot be read \(it is a FIFO\)", id="fifo"),
        pytest.param(lambda path: _put(path, KEY[:15]), "has 15 bytes; a key has 16 to 4096", id="short"),
        pytest.param(lambda path: _put(path, b""), "has 0 bytes; a key has 16 to 4096", id="empty"),
        pytest.param(lambda path: _put(path, bytes(5000)), "has more than 4096 bytes", id="long"),
        pytest.param(lambda path: _put(path, mode=0o640), "has mode 0640, .*; chmod 600 ", id="group"),
        pytest.param(lambda path: _put(path, mode=0o604), "has mode 0604, .*; chmod 600 ", id="others"),
    ],
)
def test_what_is_no_key(tmp_path: Path, make: Callable[[Path], object], words: str) -> None:
    make(tmp_path / "file")
    with pytest.raises(ConfigError, match=rf"^--vtp-edge-seed: {re.escape(str(tmp_path))}/file .*{words}") as caught:
        read_edge_key(tmp_path / "file", "--vtp-edge-seed")
    text = str(caught.value)
    assert "\n" not in text and "0123" not in text
    assert caught.value.shared is None, "a path, for other sites"


def test_another_key_than_that_of_the_checkpoint(tmp_path: Path) -> None:
    require_same_key(KEY, "--vtp-edge-seed k", tmp_path)
    write_edge_key(tmp_path, KEY)
    require_same_key(KEY, "--vtp-edge-seed k", tmp_path)
    with pytest.raises(ConfigError, match=r"^--vtp-edge-seed k holds another key than .*; leave the flag out"):
        require_same_key(KEY * 2, "--vtp-edge-seed k", tmp_path)
