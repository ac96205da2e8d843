"""``checkpoint show`` and ``verify``: what they say of small checkpoints, whole and broken, without torch."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tests.rules.import_rules import ROOT
from tests.support.checkpoints import EXPERTS, NORM, QKV, Writer, by_block, by_bucket, by_name, make_model, run_action
from vtp_plugin.checkpoint.format.checkpoint_files import load_object
from vtp_plugin.checkpoint.format.index import Extent
from vtp_plugin.checkpoint.format.shard_map import MAP

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an action; return exit code and lines, of the error stream if it was refused."""
    return partial(run_action, capsys)


def test_show_is_short(run: Run, tmp_path: Path) -> None:
    folder = by_bucket(tmp_path / "a", make_model(dtype=torch.bfloat16))
    code, lines = run("show", folder)
    assert code == 0 and len(lines) == 8
    assert lines[0] == f"{folder}: iteration 3, torch_dist"
    assert lines[1].endswith(" in 2 files")
    assert lines[2] == "saved with tp 2"
    assert lines[3] == f"optimizer dp_reshardable, with {MAP}: any layout loads it; steps 3"
    assert lines[4].startswith("weight: 5 tensors, bfloat16, 14 pieces, ")
    assert [line.partition(" ")[0] for line in lines[5:]] == ["master:", "exp_avg:", "exp_avg_sq:"]
    (folder / MAP).unlink()
    assert f"dp_reshardable, without {MAP}: any layout loads it if where its" in run("show", folder)[1][3]


def test_show_names_every_tensor_if_asked(run: Run, tmp_path: Path) -> None:
    folder = by_name(tmp_path / "a", make_model(), is_older=True)
    lines = run("show", folder, "--verbose")[1]
    assert any(line.startswith(f"  {EXPERTS}: float32 [2, 4, 8, 4], 4 pieces, ") for line in lines)
    assert len(lines) == 8 + 20
    read = json.loads("\n".join(run("show", folder, "--json")[1]))
    assert (read["iteration"], read["form"], read["steps"], read["sizes"]) == (3, "fully_reshardable", [3], {"tp": [2]})
    (qkv,) = (each for each in read["tensors"] if each["key"] == QKV)
    assert (qkv["state"], qkv["shape"], qkv["num_pieces"]) == ("weight", [2, 12, 4], 4)


def test_weights_alone_can_be_shown(run: Run, tmp_path: Path) -> None:
    model = make_model()
    model.states = {}
    folder = by_name(tmp_path / "a", model)
    assert "no optimizer" in run("show", folder)[1]
    assert run("verify", folder)[0] == 0


@pytest.mark.parametrize("write", [by_block, by_bucket, by_name])
@pytest.mark.parametrize("is_older", [False, True])
def test_a_whole_checkpoint_is_whole(run: Run, tmp_path: Path, write: Callable[..., Path], is_older: bool) -> None:
    folder = write(tmp_path / "a", make_model(), is_older=is_older)
    code, (line,) = run("verify", folder)
    assert code == 0 and line.startswith(f"{folder} is intact: ") and " were read" in line


def test_neither_torch_nor_megatron_is_needed(tmp_path: Path) -> None:
    by_bucket(tmp_path / "a", make_model())
    for name in ("torch", "numpy", "megatron"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for action in ("show", "verify"):
        command = [sys.executable, "-m", "vtp_plugin", "checkpoint", action, str(tmp_path / "a")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, (done.stdout, done.stderr)


def _cut_file(folder: Path) -> None:
    file = folder / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def _flip(folder: Path) -> None:
    """Change a byte of the elements of a norm."""
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    value = make_model().weights[NORM][0].numpy().tobytes()
    assert data.count(value) >= 1
    file.write_bytes(data.replace(value, bytes([value[0] ^ 1]) + value[1:], 1))


def _other_index(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        file = folder / ".metadata"
        read = pickle.loads(file.read_bytes())
        change(read)
        file.write_bytes(pickle.dumps(read))

    return spoil


def _no_part(read: Any) -> None:
    read.state_dict_metadata[QKV].chunks.pop()


def _two_parts(read: Any) -> None:
    chunks = read.state_dict_metadata[QKV].chunks
    chunks.append(chunks[0])


def _outside(read: Any) -> None:
    read.state_dict_metadata[QKV].size = torch.Size((2, 12, 3))


def _other_shape(read: Any) -> None:
    chunks = read.state_dict_metadata["embedding.weight"].chunks
    chunks[:] = [ChunkStorageMetadata(chunk.offsets, torch.Size((4, 2))) for chunk in chunks]
    read.state_dict_metadata["embedding.weight"].size = torch.Size((8, 2))


def _other_map(folder: Path) -> None:
    read = json.loads((folder / MAP).read_text())
    read["buckets"][0][1] += 1
    (folder / MAP).write_text(json.dumps(read))


def _write_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "metadata.json").write_text(text)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda folder: (folder / "metadata.json").unlink(), "metadata.json is missing", id="no-config"),
        pytest.param(_write_config("{"), "metadata.json is damaged", id="config"),
        pytest.param(
            lambda folder: (folder / "__1_0.distcp").unlink(), "__1_0.distcp is missing; a part of", id="file"
        ),
        pytest.param(_cut_file, "__1_0.distcp is cut off, with ", id="short"),
        pytest.param(_flip, "__0_0.distcp is damaged at byte ", id="byte"),
        pytest.param(_other_index(_no_part), f"{QKV} (2, 12, 4) is stored in 72 of 96 elements", id="hole"),
        pytest.param(_other_index(_two_parts), f"{QKV} (2, 12, 4) is stored twice at [0:1, 0:6, 0:4]", id="twice"),
        pytest.param(_other_index(_outside), f"{QKV} (2, 12, 3) has a part at [0:1, 0:6, 0:4]; none may", id="outside"),
        pytest.param(_other_index(_other_shape), "and float32 (4, 2) is expected", id="shape"),
        pytest.param(_other_map, f"{MAP}: optimizer.distributed.dp_group_idx_0.", id="map"),
        pytest.param(lambda folder: (folder / MAP).write_text("{"), f"{MAP} is damaged", id="no-map"),
    ],
)
def test_what_is_broken_is_named(run: Run, tmp_path: Path, spoil: Callable[[Path], object], words: str) -> None:
    folder = by_bucket(tmp_path / "a", make_model())
    spoil(folder)
    code, lines = run("verify", folder)
    assert code == 1 and lines, lines
    assert all(words in line and line.startswith(str(folder)) and line.count("; ") >= 2 for line in lines), lines
    assert json.loads("\n".join(run("verify", folder, "--json")[1]))["problems"] == lines


def test_a_broken_index_is_refused(run: Run, tmp_path: Path) -> None:
    folder = by_bucket(tmp_path / "a", make_model())
    index = folder / ".metadata"
    whole = index.read_bytes()
    for data, words in ((whole[:-9], "is damaged"), (b"cos\nsystem\n(S'true'\ntR.", "names os.system, which no index")):
        index.write_bytes(data)
        for action in ("show", "verify"):
            code, (line,) = run(action, folder)
            assert code == 2 and f"{index} {words}" in line


def test_objects_of_any_class_are_read_without_it(tmp_path: Path) -> None:
    """Such as arguments, with classes of Megatron in them; numbers that are tensors are numbers."""
    writer = Writer(tmp_path / "a")
    writer.object("x", {"path": Path("y"), "step": torch.tensor(4.0), "dtype": torch.bfloat16})
    (place,) = writer.places.values()
    (read,) = load_object(tmp_path / "a", Extent(place.relative_path, place.offset, place.length))
    assert read["step"] == 4.0
    assert read["path"].name == "pathlib.PosixPath" and read["path"].args == ("y",)
    assert read["dtype"].origin == ("torch", "bfloat16")


@pytest.mark.parametrize(("text", "shown"), [("", "is empty"), ("\n", "is empty"), ("../a", "holds '../a'")])
@pytest.mark.parametrize("action", ["show", "verify", "diff", "reshard"])
def test_a_tracker_that_names_nothing_is_named(run: Run, tmp_path: Path, action: str, text: str, shown: str) -> None:
    """Not the index of a checkpoint that nobody meant; what the line says to write into it helps."""
    by_name(tmp_path / "runs" / "iter_0000003", make_model())
    tracker = tmp_path / "runs" / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    runs = tmp_path / "runs"
    words = {"diff": [runs, runs], "reshard": ["--from", runs, "--to", tmp_path / "to"]}.get(action, [runs])
    code, lines = run(action, *words)
    assert code == 2 and f"{tracker} {shown}; it must hold the iteration of a checkpoint" in lines[0], lines
    tracker.write_text(lines[0].partition("; write ")[2].partition(" ")[0])
    assert run(action, *words)[0] == 0
