"""A checkpoint with a broken file: every rank ends with one line that names the file and what can be loaded instead."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, assert_same_training

pytestmark = pytest.mark.needs("scripts_here")

LEGACY = ["--ckpt-format", "torch"]
LATEST, TRACKER = "iter_0000004", "latest_checkpointed_iteration.txt"


@pytest.fixture(scope="module")
def written(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders with checkpoints of steps 2 and 4; each is made once."""
    known: dict[tuple[str, ...], Path] = {}

    def write(*extra: str) -> Path:
        if extra not in known:
            folder = tmp_path_factory.mktemp("whole")
            scripts.train("1,2", [*extra, "--save", str(folder), "--save-interval", "2"])
            known[extra] = folder
        return known[extra]

    return write


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _damage(file: Path) -> None:
    file.write_bytes(b"{" + bytes(range(256)))


def _write(text: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(text) and None


OLDER = "load an older one with --ckpt-step 2"


def _case(name: str, file: str, spoil: Callable[[Path], Any], *words: str, full: bool = True) -> Any:
    marks = [pytest.mark.full] if full else []
    return pytest.param(file, spoil, list(words), id=name, marks=marks)


@pytest.mark.parametrize(
    ("pattern", "spoil", "words"),
    [
        _case("cut", f"{LATEST}/__1_0.distcp", _cut, "is cut off, with ", OLDER, full=False),
        _case("cut-of-rank-0", f"{LATEST}/__0_0.distcp", _cut, "is cut off, with ", OLDER),
        _case("lost", f"{LATEST}/__2_0.distcp", Path.unlink, "is missing", OLDER),
        _case("index", f"{LATEST}/.metadata", _cut, "is cut off, with ", OLDER),
        _case("no-index", f"{LATEST}/.metadata", Path.unlink, "is missing", OLDER),
        _case("config", f"{LATEST}/metadata.json", _damage, "has grown, with ", OLDER),
        _case("no-config", f"{LATEST}/metadata.json", Path.unlink, "is missing", OLDER),
        _case("common", f"{LATEST}/common.pt", _cut, "is cut off, with ", OLDER),
        _case("no-common", f"{LATEST}/common.pt", Path.unlink, "is missing", OLDER),
        _case("folder", LATEST, shutil.rmtree, f"is missing; {TRACKER} names it", OLDER),
        _case("tracker", TRACKER, _write("4 and"), "holds '4 and'; it must hold", "write 4 into it", full=False),
        _case("empty-tracker", TRACKER, _write(""), "is empty; it must hold", "write 4 into it"),
        _case("no-tracker", TRACKER, Path.unlink, "is missing; it must hold", "write 4 into it"),
    ],
)
def test_a_broken_file_is_named(
    scripts: Scripts,
    written: Callable[..., Path],
    tmp_path: Path,
    pattern: str,
    spoil: Callable[[Path], Any],
    words: list[str],
) -> None:
    folder = Path(shutil.copytree(written(), tmp_path / "copy"))
    if pattern.endswith("common.pt") and not (folder / pattern).exists():
        pytest.skip("this Megatron writes no common.pt")
    spoil(folder / pattern)
    runs = scripts.launch(3, {"arguments": arguments("1,2", extra=["--load", str(folder)])})
    assert_refused(runs, str(folder / pattern), *words)


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "spoil", "words"),
    [
        ("mp_rank_00_000/model_optim_rng.pt", _cut, ["is cut off, with ", OLDER]),
        ("mp_rank_01_001/model_optim_rng.pt", _cut, ["is cut off, with ", OLDER]),
        ("mp_rank_00_000/model_optim_rng.pt", Path.unlink, ["is missing", OLDER]),
        ("mp_rank_01_001/model_optim_rng.pt", Path.unlink, ["is missing", OLDER]),
    ],
)
def test_a_broken_file_of_one_rank_is_named(
    scripts: Scripts,
    written: Callable[..., Path],
    tmp_path: Path,
    file: str,
    spoil: Callable[[Path], Any],
    words: list[str],
) -> None:
    """In the old format each rank has a file."""
    folder = Path(shutil.copytree(written(*LEGACY), tmp_path / "copy"))
    spoil(folder / LATEST / file)
    runs = scripts.launch(3, {"arguments": arguments("1,2", extra=[*LEGACY, "--load", str(folder)])})
    assert_refused(runs, str(folder / LATEST / file), *words)


@pytest.mark.full
def test_an_older_checkpoint_is_loaded_instead(scripts: Scripts, written: Callable[..., Path], tmp_path: Path) -> None:
    """What the line recommends works; and a folder without any checkpoint is where a run begins."""
    folder = Path(shutil.copytree(written(), tmp_path / "copy"))
    _cut(folder / LATEST / "__0_0.distcp")
    whole = scripts.train("1,2")
    older = scripts.train("1,2", ["--load", str(folder), "--ckpt-step", "2"])
    assert_same_training(older, whole, first=2)
    fresh = ["--load", str(tmp_path / "none"), "--save", str(tmp_path / "none"), "--save-interval", "4"]
    runs = scripts.finish(3, {"arguments": arguments("1,2", extra=fresh)})
    assert_same_training(runs, whole)
