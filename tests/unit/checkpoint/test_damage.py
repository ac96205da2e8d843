"""Damage of every file of a checkpoint is found and named; a folder appears as a whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.utils import _create_file_view

from tests.support.checkpoints import by_bucket, make_model
from tests.unit.checkpoint.test_show_and_verify import Run, run  # noqa: F401
from vtp_plugin.checkpoint.format.checkpoint_files import iterations, way_out
from vtp_plugin.checkpoint.format.index import (
    ALGORITHMS,
    MANIFEST,
    Extent,
    Hashing,
    Manifest,
    dump_manifest,
    hash_bytes,
    load_manifest,
    make_manifest,
)
from vtp_plugin.checkpoint.format.resolver import TRACKER, Asked
from vtp_plugin.checkpoint.save import atomic_dir
from vtp_plugin.checkpoint.save.atomic_dir import (
    PieceChecks,
    clear,
    discard,
    partial_of,
    problem_of,
    put_in_place,
    whole_folder,
    write_whole,
)
from vtp_plugin.checkpoint.save.saving import Kept, Saving, Savings
from vtp_plugin.errors import ConfigError


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _flip(file: Path, place: int | None = None) -> None:
    """Flip one bit, in the middle if no place is named."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    file.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {"cut": _cut, "empty": _empty, "missing": Path.unlink, "bit": _flip}


def _save(folder: Path, iteration: int) -> Path:
    final = folder / f"iter_{iteration:07d}"
    with whole_folder(final) as partial:
        source = by_bucket(folder / f"source{iteration}", make_model(iteration))
        for file in source.iterdir():
            file.rename(partial / file.name)
        source.rmdir()
    return final


FILES = [".metadata", "metadata.json", "__0_0.distcp", "vtp_optimizer_map.json", MANIFEST]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_of_every_file_is_named(run: Run, tmp_path: Path, name: str, damage: str) -> None:  # noqa: F811
    checkpoint = _save(tmp_path, 2)
    assert problem_of(checkpoint) is None
    code, (line,) = run("verify", checkpoint)
    assert code == 0 and line.startswith(f"{checkpoint} is intact") and MANIFEST not in line
    DAMAGES[damage](checkpoint / name)
    if (name, damage) == (MANIFEST, "missing"):  # arguments, which these have not, say that there was one
        assert problem_of(checkpoint) is None
        return
    problem = problem_of(checkpoint)
    assert problem is not None and problem.startswith(f"{checkpoint / name} "), problem
    code, lines = run("verify", tmp_path)
    assert code == 1 and lines[0].startswith(f"{checkpoint / name} ") and lines[0].count(";") == 2


def test_a_changed_piece_is_found_while_it_is_read(tmp_path: Path) -> None:
    checkpoint = _save(tmp_path, 2)
    (checkpoint / "__9_0.distcp").write_bytes(b"0123456789")
    manifest = make_manifest(checkpoint, _pieces(checkpoint / "__9_0.distcp", 4, 6))
    with PieceChecks(checkpoint, manifest, way_out) as checks:
        _watch(checks, checkpoint, Extent("__9_0.distcp", 0, 4))
        _watch(checks, checkpoint, Extent("__0_0.distcp", 3, 5))
    _flip(checkpoint / "__9_0.distcp")
    with PieceChecks(checkpoint, manifest, way_out) as checks:
        _watch(checks, checkpoint, Extent("__9_0.distcp", 0, 4))
    with (
        pytest.raises(ConfigError, match=r"__9_0\.distcp is damaged between bytes 4 and 10; without it .*; copy it"),
        PieceChecks(checkpoint, manifest, way_out) as checks,
    ):
        _watch(checks, checkpoint, Extent("__9_0.distcp", 4, 6))
        raise ValueError("which torch raises of a damaged archive")


def _watch(checks: PieceChecks, checkpoint: Path, extent: Extent) -> Any:
    file = io.BytesIO((checkpoint / extent.file).read_bytes())
    return checks.watch(_create_file_view(file, extent.offset, extent.length or 0), extent)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_piece_is_checked_in_whatever_order_it_is_read(data: st.DataObject) -> None:
    size = 200_000
    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name)
        (checkpoint / "__9_0.distcp").write_bytes(random.Random(7).randbytes(size))
        start = data.draw(st.integers(0, size - 1))
        extent = Extent("__9_0.distcp", start, size - start)
        manifest = make_manifest(checkpoint, _pieces(checkpoint / "__9_0.distcp", *filter(None, (start, size - start))))
        damage = data.draw(st.none() | st.integers(start, size - 1))
        if damage is not None:
            _flip(checkpoint / "__9_0.distcp", damage)
        reads = data.draw(st.lists(st.tuples(st.integers(0, size - start), st.integers(0, size), st.booleans())))
        with contextlib.ExitStack() as stack:
            if damage is not None:
                stack.enter_context(pytest.raises(ConfigError, match=f"is damaged between bytes {start} and {size}"))
            file = _watch(stack.enter_context(PieceChecks(checkpoint, manifest, way_out)), checkpoint, extent)
            wanted = (checkpoint / "__9_0.distcp").read_bytes()[start:]
            for at, count, is_into in reads:
                file.seek(at)
                buffer = bytearray(count)
                found = buffer[: file.readinto(buffer)] if is_into else file.read(count)
                assert found == wanted[at : at + count] and file.tell() == at + len(found)


def test_torch_reads_a_piece_once_and_little_of_it_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32)
    torch.save(tensor, tmp_path / "__9_0.distcp")
    size = (tmp_path / "__9_0.distcp").stat().st_size
    manifest = make_manifest(tmp_path, _pieces(tmp_path / "__9_0.distcp", size))
    again: list[int] = []
    monkeypatch.setattr(atomic_dir, "hash_bytes", lambda *args: again.append(args[3]) or hash_bytes(*args))
    with PieceChecks(tmp_path, manifest, way_out) as checks:
        found = torch.load(_watch(checks, tmp_path, Extent("__9_0.distcp", 0, size)), weights_only=True)
    assert torch.equal(found, tensor) and sum(again) < size - tensor.nbytes + 1


def _pieces(file: Path, *lengths: int) -> dict[Extent, str]:
    found, start = {}, 0
    for length in lengths:
        hashing = Hashing()
        hashing.update(file.read_bytes()[start : start + length])
        found[Extent(file.name, start, length)] = str(hashing)
        start += length
    return found


def test_what_was_not_written_to_its_end_gets_no_manifest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    with pytest.raises(ConfigError, match="a has 3 bytes, and 4 were written"):
        make_manifest(tmp_path, {Extent("a", 0, 4): "crc32:00000000"})


def test_a_hash_that_nobody_here_can_make_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"123")
    manifest = Manifest({"a": 3}, {Extent("a", 0, 3): "better:12"})
    write_whole(tmp_path / MANIFEST, dump_manifest(manifest))
    assert load_manifest(tmp_path) == manifest and not manifest.can_check
    write_whole(tmp_path / MANIFEST, dump_manifest(manifest).replace('"version":1', '"version":2'))
    with pytest.raises(ConfigError, match="is damaged"):  # its own hash tells
        load_manifest(tmp_path)


def test_the_best_hash_is_the_fast_one() -> None:
    assert next(iter(ALGORITHMS)) in ("xxh3_128", "crc32")


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "new" / "iter_0000004"

    def fail() -> None:
        with whole_folder(final) as partial:
            (partial / "a").write_text("half")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert not final.exists() and (partial_of(final) / "a").exists() and not (final.parent / TRACKER).exists()
    assert iterations(final.parent) == [] and Asked(load_dir=str(final.parent)).candidates() == []
    with whole_folder(final) as partial:
        (partial / "a").write_text("whole")
    assert (final / "a").read_text() == "whole" and not partial_of(final).exists()
    assert (final.parent / TRACKER).read_text() == "4"
    assert sorted(path.name for path in final.parent.iterdir()) == ["iter_0000004", TRACKER]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_another(
    tmp_path: Path, can_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_exchange:
        monkeypatch.setattr("vtp_plugin.checkpoint.save.atomic_dir._exchange", lambda *_: False)
    for name in ("partial_iter_0000002", "iter_0000002"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    put_in_place(tmp_path / "partial_iter_0000002", tmp_path / "iter_0000002")
    clear(tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == ["iter_0000002", "partial_iter_0000002"]


def test_what_a_stopped_save_left_is_cleared_away_unless_it_goes_on(tmp_path: Path) -> None:
    for iteration in (2, 4):
        (tmp_path / f"partial_iter_000000{iteration}" / "mp_rank_07").mkdir(parents=True)
    savings = Savings()
    with savings.call(6):
        begun = savings.begin(Saving(tmp_path / "iter_0000004", is_by_rank=False))
        assert not any(tmp_path.iterdir())  # also of the same iteration: an earlier run may have had other ranks
        begun.partial.mkdir()
        savings.begin(Saving(tmp_path / "iter_0000006", is_by_rank=False))
    assert [path.name for path in tmp_path.iterdir()] == ["partial_iter_0000004"]
    assert savings.find(begun.partial / "mp_rank_00" / "x") is begun and savings.find(tmp_path) is None
    discard(tmp_path / "nothing")


@pytest.mark.parametrize("iteration", [2, 4])
def test_the_newest_that_is_whole_comes_first(tmp_path: Path, iteration: int) -> None:
    for number in (2, 4, 6):
        _save(tmp_path, number)
    (tmp_path / TRACKER).write_text(str(iteration))
    asked = Asked(load_dir=str(tmp_path))
    assert [found.name for found in asked.candidates()] == [str(number) for number in (4, 2) if number <= iteration]
    (tmp_path / TRACKER).write_text("")
    assert [found.name for found in asked.candidates()] == ["6", "4", "2"]


def test_the_last_good_one_stays(tmp_path: Path) -> None:
    """Broken ones do not count, and the new one always stays."""
    for number in (2, 4, 6):
        _flip(_save(tmp_path, number) / "metadata.json") if number == 4 else _save(tmp_path, number)
    found, whole = iterations(tmp_path), iterations(tmp_path, is_whole=True)
    assert (found, whole) == ([2, 4, 6], [2, 6])
    assert Kept(count=2).removed(found, whole, new=6, before=4) == []
    assert Kept(count=1).removed(found, whole, new=6, before=4) == [2, 4]
    assert Kept(count=1).removed([2, 4, 6], [6], new=4, before=6) == [2]  # of a run that went back
