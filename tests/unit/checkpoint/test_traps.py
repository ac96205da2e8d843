"""Checkpoints made to run something, to fill the memory, to wait for ever or to lead elsewhere: each is one line."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import by_bucket, make_model, run_action
from tests.support.hostile_files import NAME, spoil
from tests.unit.util.test_untrusted_files import TRAPS
from vtp_plugin.checkpoint.format.checkpoint_files import check_files, check_trackers, load_object
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.index import MANIFEST, DamagedError, Extent, dump_manifest, make_manifest
from vtp_plugin.checkpoint.format.resolver import TRACKER, Asked
from vtp_plugin.checkpoint.format.safe_pickle import load_safely
from vtp_plugin.checkpoint.format.shard_map import MAP
from vtp_plugin.checkpoint.tools.verify import Verification
from vtp_plugin.errors import ConfigError

Run = Callable[..., tuple[int, list[str]]]
ENOUGH_BYTES = 64 << 20


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an action; return exit code and lines, of the error stream if it was refused."""
    return partial(run_action, capsys)


@contextmanager
def little_memory() -> Iterator[None]:
    """Fail where much memory is taken."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < ENOUGH_BYTES
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its map and its manifest, and the shared values in a file."""
    folder = tmp_path_factory.mktemp("made") / "iter_0000003"
    by_bucket(folder, make_model(), is_older=True)
    (folder / MANIFEST).write_text(dump_manifest(make_manifest(folder)))
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(made, tmp_path / "a" / made.name))


def actions(folder: Path, other: Path) -> Iterator[tuple[object, ...]]:
    """Yield all that reads a checkpoint, apart from ``export``, which begins as ``show``."""
    yield "show", folder
    yield "verify", folder
    yield "diff", folder, other
    yield "reshard", "--from", folder, "--to", other.parent.parent / "resharded"
    yield "export", "--from", folder, "--to", other.parent.parent / "exported", "--like", other.parent.parent


def assert_lines(run: Run, folder: Path, *words: str, other: Path | None = None) -> None:
    """Check that ``show`` and ``verify``, with another one all actions, end by themselves, and say what is wrong."""
    said: list[str] = []
    for words_of in actions(folder, folder) if other is None else actions(folder, other):
        if other is None and words_of[0] not in ("show", "verify"):
            continue
        code, lines = run(*words_of)
        assert code in (0, 1, 2), words_of
        assert not any("Traceback" in line for line in lines)
        said += lines
    assert [line for line in said if all(word in line for word in words)], said


@pytest.mark.parametrize("name", [".metadata", "common.pt", "object optimizer", "tensor"])
def test_tools_run_nothing(run: Run, made: Path, copy: Path, tmp_path: Path, name: str) -> None:
    spoil(copy, name, tmp_path / "marker")
    for words in actions(copy, made):
        run(*words)
    assert not (tmp_path / "marker").exists()
    if name == ".metadata":
        assert_lines(run, copy, f"names {NAME}, which no index of a checkpoint needs", "whose origin you know")


@pytest.mark.parametrize(
    "text",
    [b"cposix\nmkdir\n(S'{}'\ntR.", b"(S'{}'\niposix\nmkdir\n.", b"\x80\x04\x8c\x05posix\x8c\x05mkdir\x93\x8c{}\x85R."],
)
def test_no_way_of_naming_runs(copy: Path, tmp_path: Path, text: bytes) -> None:
    marker = str(tmp_path / "marker").encode()
    pickled = text.replace(b"{}", (bytes([len(marker)]) if b"\x93" in text else b"") + marker)
    load_safely(pickled)
    (copy / ".metadata").write_bytes(pickled)
    with pytest.raises(ConfigError, match=f"names {NAME}"):
        Contents(copy)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", MANIFEST, MAP, "__0_0.distcp"])
def test_what_is_no_file(run: Run, made: Path, copy: Path, name: str, trap: str) -> None:
    (copy / name).unlink()
    TRAPS[trap](copy / name)
    if name != MANIFEST:
        (copy / MANIFEST).unlink()
    # A large shard is a long one only.
    words = () if (name, trap) in (("__0_0.distcp", "large"), ("__0_0.distcp", "device")) else (str(copy / name),)
    assert_lines(run, copy, *words, other=made if trap == "FIFO" else None)


@pytest.mark.parametrize("trap", [trap for trap in TRAPS if trap != "folder"])
def test_a_note_about_the_newest_that_is_no_file(copy: Path, run: Run, trap: str) -> None:
    tracker = copy.parent / TRACKER
    TRAPS[trap](tracker)
    code, lines = run("show", copy.parent)
    assert code == 2 and f"{tracker} cannot be read" in lines[0] and "remove it" in lines[0]
    with pytest.raises(ConfigError, match="cannot be read"):
        list(check_trackers(Asked(load_dir=str(copy.parent))))
    tracker.unlink()
    tracker.write_text("3")
    assert run("show", copy.parent)[0] == 0 and [*check_trackers(Asked(load_dir=str(copy.parent)))] == [], (
        "the way out works"
    )


@pytest.mark.parametrize("text", ["../a/iter_0000003", "/etc", "9" * 150, "9" * 10_000, "3\x1b[2J"])
def test_a_note_that_leads_elsewhere(copy: Path, run: Run, text: str) -> None:
    (copy.parent / TRACKER).write_text(text)
    code, lines = run("show", copy.parent)
    assert code == 2 and str(copy.parent) in lines[0] and "\x1b" not in lines[0]


# Tuples, each of which holds the one before twice.
_GROWING = b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n - 1, n - 1, n) for n in range(1, 100))
BOMBS = {
    "memory": b"\x80\x02Nr\xff\xff\xff\x07.",
    "memory-in-text": b"Np999999999\n.",
    "array": b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b".",
    "string": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "frame": b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.",
    "number": b"L" + b"9" * 100_000 + b"L\n.",
    "long": b"\x80\x02\x8b" + (4000).to_bytes(4, "little") + b"\x7f" * 4000 + b".",
    "names": b"".join(b"cbuiltins\nn%d\n0" % n for n in range(10_000)) + b"N.",
    "key": b"\x80\x02}(" + _GROWING + b"Nu.",
    "members": b"\x80\x04\x8f(" + _GROWING + b"\x90.",
    "deep": b"\x80\x02}(" + b")" + b"\x85" * 100_000 + b"Nu.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_few_bytes_take_no_more(copy: Path, name: str) -> None:
    (copy / ".metadata").write_bytes(BOMBS[name])
    with little_memory(), pytest.raises(ConfigError, match=r"\.metadata (is damaged|names)"):
        Contents(copy)


def test_a_list_that_holds_another_twice_ends(tmp_path: Path) -> None:
    """A value of 2 to the 60 elements in 300 bytes."""
    value: Any = ["end"]
    for _ in range(60):
        value = [value, value]
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps(value, 2))
    with pytest.raises(DamagedError, match="too often"):
        load_object(tmp_path, Extent("a.pt"))


def _compressed(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps("a" * (8 << 20), 2))


def _overlapping(file: Path) -> None:
    """Let many entries of the table of contents be the same bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2) + bytes(1 << 16))
        (entry,) = archive.infolist()
        for number in range(2000):
            again = zipfile.ZipInfo(f"a/{number}")
            for name in ("CRC", "compress_size", "file_size", "header_offset"):
                setattr(again, name, getattr(entry, name))
            archive.filelist.append(again)
    file.write_bytes(made.getvalue())


def _lying(file: Path) -> None:
    """Say of an entry that it has 2 GiB."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.infolist()[0].file_size = archive.infolist()[0].compress_size = 1 << 31


def _twice(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))
        archive.writestr("a/data.pkl", pickle.dumps({}, 2))


@pytest.mark.parametrize(
    ("make", "problem"),
    [(_compressed, "is compressed"), (_overlapping, "more bytes"), (_lying, "more bytes"), (_twice, "one name")],
)
def test_an_archive_is_no_larger_than_its_file(
    run: Run, made: Path, copy: Path, make: Callable[[Path], None], problem: str
) -> None:
    make(copy / "common.pt")
    (copy / MANIFEST).unlink()
    assert_lines(run, copy, str(copy / "common.pt"), problem)


def test_a_tensor_is_no_larger_than_its_bytes(run: Run, made: Path, copy: Path) -> None:
    """Its own pickle says a shape; so does the index."""
    read = pickle.loads((copy / ".metadata").read_bytes())
    for entry in read.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            for chunk in entry.chunks:
                chunk.sizes = type(chunk.sizes)(1 << 40 for _ in chunk.sizes)
            entry.size = type(entry.size)(1 << 40 for _ in entry.size)
    (copy / ".metadata").write_bytes(pickle.dumps(read))
    assert_lines(run, copy, str(copy))


NAMES = ["../../etc/passwd", "/etc/passwd", "a/../../b", "", "\x1b[2J", "link/passwd", "x" * 300]


@pytest.mark.parametrize("name", NAMES)
def test_an_index_names_files_beside_it(run: Run, made: Path, copy: Path, name: str) -> None:
    (copy / "link").symlink_to("/etc")
    read = pickle.loads((copy / ".metadata").read_bytes())
    for place in read.storage_data.values():
        place.relative_path = name
    (copy / ".metadata").write_bytes(pickle.dumps(read))
    (copy / MANIFEST).unlink()
    assert_lines(run, copy, f"{copy / '.metadata'} names a file that it must not")
    (copy.parent / TRACKER).write_text("3")
    assert any("names a file that it must not" in line for line in check_files(Asked(load_dir=str(copy.parent))))


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_names_files_beside_it(run: Run, made: Path, copy: Path, name: str) -> None:
    (copy / "link").symlink_to("/etc")
    text = dump_manifest(make_manifest(copy)).split("\n")[0]
    read = json.loads(text)
    read["files"][name] = read["files"].pop("common.pt")
    _write_manifest(copy, read)
    assert_lines(run, copy, f"{copy / MANIFEST} names a file that it must not")


def _write_manifest(folder: Path, read: Any) -> None:
    from vtp_plugin.checkpoint.format.index import Hashing

    text = json.dumps(read, separators=(",", ":"))
    hashing = Hashing()
    hashing.update(text.encode())
    (folder / MANIFEST).write_text(f"{text}\n{hashing}\n")


def test_pieces_of_a_manifest_are_read_once(copy: Path) -> None:
    read = json.loads(dump_manifest(make_manifest(copy)).split("\n")[0])
    size, (piece, *_) = read["files"]["__0_0.distcp"]
    read["files"]["__0_0.distcp"] = [size, [[number, size - number, piece[2]] for number in range(1000)]]
    _write_manifest(copy, read)
    (line,) = Verification(copy).problems(lambda _: None)
    assert f"{copy / MANIFEST} is damaged" in line


STRANGE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.just([])
    | st.just({})
    | st.just([[]])
)


def _replaced(value: Any, number: int, new: Any) -> tuple[Any, int]:
    """Put something into the place of one value inside another, by its number; return how many are left."""
    if number == 0:
        return new, -1
    number -= 1
    if isinstance(value, dict):
        changed = {}
        for key, each in value.items():
            changed[key], number = (each, -1) if number < 0 else _replaced(each, number, new)
        return changed, number
    if isinstance(value, list):
        entries = []
        for each in value:
            each, number = (each, -1) if number < 0 else _replaced(each, number, new)
            entries.append(each)
        return entries, number
    return value, number


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([MANIFEST, MAP, "metadata.json"]), st.integers(0, 80), STRANGE)
def test_any_value_in_the_place_of_any_other(
    made: Path, tmp_path_factory: pytest.TempPathFactory, name: str, number: int, new: Any
) -> None:
    """Each reader of a file of JSON takes what it finds, or says so."""
    copy = Path(shutil.copytree(made, tmp_path_factory.mktemp("fuzzed") / made.name))
    text = (copy / name).read_text()
    read, _ = _replaced(json.loads(text.split("\n")[0] if name == MANIFEST else text), number, new)
    if name == MANIFEST:
        _write_manifest(copy, read)
    else:
        (copy / name).write_text(json.dumps(read))
        (copy / MANIFEST).unlink()
    lines = [*_problems(copy)]
    assert all(isinstance(line, str) for line in lines)
    shutil.rmtree(copy)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([".metadata", "common.pt", "__0_0.distcp", MAP, MANIFEST]), st.data())
def test_any_bytes_in_the_place_of_any_others(
    made: Path, tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    copy = Path(shutil.copytree(made, tmp_path_factory.mktemp("fuzzed") / made.name))
    whole = bytearray((copy / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    (copy / name).write_bytes(whole)
    if name != MANIFEST:
        (copy / MANIFEST).unlink()
    assert all(isinstance(line, str) for line in _problems(copy))
    shutil.rmtree(copy)


def _problems(folder: Path) -> Iterator[str]:
    """Read all of a checkpoint, as the tools do; only errors for a person may come."""
    try:
        yield from Verification(folder).problems(lambda _: None)
        contents = Contents(folder)
        for read in (contents.weights, contents.states, contents.steps):
            read()
    except ConfigError as error:
        yield str(error)
