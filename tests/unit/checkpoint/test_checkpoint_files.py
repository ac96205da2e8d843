"""Broken files of checkpoints, in folders as small as possible; `test_training_broken_files.py` has real ones."""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtp_plugin.checkpoint.format import checkpoint_files
from vtp_plugin.checkpoint.format.checkpoint_files import naming_broken_files
from vtp_plugin.checkpoint.format.resolver import TRACKER, Asked
from vtp_plugin.errors import ConfigError, LayoutError


def make(folder: Path, *iterations: int, note: str | None = None) -> Path:
    """Write checkpoints of one tensor each, as Megatron before 0.19 does, and the note about the newest."""
    for number in iterations:
        checkpoint = folder / f"iter_{number:07d}"
        checkpoint.mkdir()
        (checkpoint / "metadata.json").write_text("{}")
        (checkpoint / "__0_0.distcp").write_bytes(bytes(100))
        place = SimpleNamespace(relative_path="__0_0.distcp", offset=60, length=40)
        stored = SimpleNamespace(storage_data={Key("weight"): place})
        (checkpoint / ".metadata").write_bytes(pickle.dumps(stored))
        with zipfile.ZipFile(checkpoint / "common.pt", "w") as archive:
            archive.writestr("data", "")
    if note is not None:
        (folder / TRACKER).write_text(note)
    return folder


@dataclass(frozen=True)
class Key:
    """A key with the name of a tensor, as torch's."""

    fqn: str


def check_tracker(folder: str, step: int | None = None) -> tuple[str, ...]:
    """Check the tracker of a folder."""
    return (*checkpoint_files.check_trackers(Asked(load_dir=folder, step=step)),)


def check_files(folder: str, step: int | None = None) -> tuple[str, ...]:
    """Check the files of the checkpoint that a run would load from a folder."""
    return checkpoint_files.check_files(Asked(load_dir=folder, step=step))


@pytest.mark.parametrize("note", ["4", " 4\n", "release"])
def test_a_right_note(tmp_path: Path, note: str) -> None:
    assert check_tracker(str(make(tmp_path, 4, note=note))) == ()


def test_a_run_begins_where_there_is_nothing(tmp_path: Path) -> None:
    assert check_tracker(str(tmp_path / "none")) == check_tracker(str(tmp_path)) == ()
    assert check_files(str(tmp_path)) == ()
    (make(tmp_path, 2) / "iter_0000002" / "metadata.json").unlink()
    assert check_tracker(str(tmp_path)) == (), "the first save was interrupted"
    assert check_tracker("msc://x") == check_files("msc://x") == ()


def test_a_lost_note(tmp_path: Path) -> None:
    rule = "it must hold the iteration of a checkpoint, or the word release; write 4 into it"
    folder = str(make(tmp_path, 2, 4))
    assert check_tracker(folder) == (f"{tmp_path / TRACKER} is missing; {rule}",)
    assert check_tracker(folder, step=2) == (), "--ckpt-step needs none"
    (tmp_path / TRACKER).write_text("")
    assert check_tracker(folder) == check_tracker(folder, step=2) == (f"{tmp_path / TRACKER} is empty; {rule}",)
    (tmp_path / TRACKER).write_text("-4")
    assert check_tracker(folder) == (f"{tmp_path / TRACKER} holds '-4'; {rule}",)


@pytest.mark.parametrize(
    ("name", "spoiled", "words"),
    [
        ("metadata.json", None, "is missing or cannot be read"),
        ("metadata.json", b"{", "is damaged"),
        (".metadata", None, "is missing or cannot be read"),
        (".metadata", b"", "is damaged"),
        ("__0_0.distcp", None, "is missing"),
        ("__0_0.distcp", bytes(99), "is cut off, with 99 of 100 bytes"),
        ("common.pt", None, "is missing"),
        ("common.pt", b"PK", "is cut off or damaged"),
    ],
)
def test_a_broken_file(tmp_path: Path, name: str, spoiled: bytes | None, words: str) -> None:
    folder = str(make(tmp_path, 2, 4, note="4"))
    assert check_files(folder) == check_files(folder, step=2) == ()
    file = tmp_path / "iter_0000004" / name
    file.unlink()
    if spoiled is not None:
        file.write_bytes(spoiled)
    line = f"{file} {words}; without it this checkpoint cannot be loaded; copy it again, or load an older one with"
    assert check_files(folder) == (f"{line} --ckpt-step 2",)
    assert check_files(folder, step=2) == ()


def test_a_lost_folder(tmp_path: Path) -> None:
    folder = str(make(tmp_path, 2, note="4"))
    lost = tmp_path / "iter_0000004"
    (line,) = check_files(folder)
    assert line == f"{lost} is missing; {TRACKER} names it; copy it again, or load an older one with --ckpt-step 2"
    assert check_files(str(make(tmp_path / "iter_0000002", note="release")))
    assert check_files(folder, step=3) and check_files(folder, step=2) == ()


def test_the_old_format(tmp_path: Path) -> None:
    file = tmp_path / "iter_0000004" / "mp_rank_00_000" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("data", "")
    (tmp_path / TRACKER).write_text("4")
    assert check_files(str(tmp_path)) == ()
    file.write_bytes(file.read_bytes()[:-4])
    (line,) = check_files(str(tmp_path))
    assert line.startswith(f"{file} is cut off or damaged; ")


def test_an_error_is_explained_by_a_broken_file_only(tmp_path: Path) -> None:
    folder = make(tmp_path, 4, note="4")
    with pytest.raises(SystemExit), naming_broken_files(Asked(load_dir=str(folder))):
        raise SystemExit
    (folder / "iter_0000004" / "common.pt").unlink()
    with pytest.raises(ConfigError, match=r"common\.pt is missing"), naming_broken_files(Asked(load_dir=str(folder))):
        raise SystemExit
    with pytest.raises(LayoutError), naming_broken_files(Asked(load_dir=str(folder))):
        raise LayoutError("another reason")
    with pytest.raises(SystemExit), naming_broken_files(None):
        raise SystemExit
