"""``checkpoint reshard``: another form of the same state, written once, that goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.support.checkpoints import (
    QKV,
    SHAPES,
    STOCK_SHAPES,
    Model,
    by_block,
    by_bucket,
    by_name,
    by_rank,
    happens_in_writes,
    make_model,
    run_action,
)
from tests.support.hosts import PYTHON_PATH
from vtp_plugin.checkpoint.format.checkpoint_files import load_object
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.index import Extent
from vtp_plugin.checkpoint.format.resolver import BY_BLOCK, BY_BUCKET_OLDER, BY_RANK, IN_MODEL_SPACE, PLAIN
from vtp_plugin.checkpoint.format.shard_map import MAP
from vtp_plugin.checkpoint.hf.hf_model import ASIDE, NOTE
from vtp_plugin.checkpoint.save.atomic_dir import EDGE_KEY, clear, read_kept_key, write_edge_key
from vtp_plugin.checkpoint.tools.writer import JOURNAL, NewPiece, PieceWriter

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run an action; return exit code and lines, of the error stream if it was refused."""
    return partial(run_action, capsys)


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_it_is_the_same_state_by_name(run: Run, tmp_path: Path, is_older: bool, axis: int) -> None:
    a = by_bucket(tmp_path / "a", make_model(dtype=torch.bfloat16), ranks=4, axis=axis, is_older=is_older)
    code, (line,) = run("reshard", "--from", a, "--to", tmp_path / "b")
    b = tmp_path / "b" / "iter_0000003"
    assert code == 0 and line.startswith(f"wrote {b}: ") and line.endswith(f"; load it with --load {tmp_path / 'b'}")
    assert (tmp_path / "b" / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert run("diff", a, tmp_path / "b")[0] == run("verify", b)[0] == 0
    contents = Contents(b)
    assert contents.form == contents.common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    assert contents.common["optimizer"]["optimizer"]["param_groups"] == [{"wd_mult": 1.0, "lr_mult": 1.0, "step": 3.0}]
    assert not any("dp_group_idx" in key for key in (*contents.index.tensors, *contents.index.objects))
    assert (b / "common.pt").exists() == is_older
    assert sorted(path.name for path in b.iterdir() if path.name != "common.pt") == [
        ".metadata", "__0_0.distcp", "metadata.json", "vtp_manifest.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [NOTE, ASIDE])
def test_the_note_of_an_import_goes_along(run: Run, tmp_path: Path, name: str) -> None:
    """So other flags are still refused beside it, or still allowed."""
    a = by_bucket(tmp_path / "a", make_model())
    (a / name).write_text('{"version": 2}')
    assert run("reshard", "--from", a, "--to", tmp_path / "b")[0] == 0
    assert (tmp_path / "b" / "iter_0000003" / name).read_text() == '{"version": 2}'
    assert run("verify", tmp_path / "b")[0] == 0


def test_the_key_of_an_edge_goes_along(run: Run, tmp_path: Path) -> None:
    """For its owner alone; one that others could read already is not copied, and nothing is written."""
    a = by_bucket(tmp_path / "a", make_model())
    write_edge_key(a.parent, bytes(range(32)))
    place = (a.parent / EDGE_KEY).parent
    place.chmod(0o755)
    code, (line,) = run("reshard", "--from", a, "--to", tmp_path / "b")
    assert code == 2 and "has mode 0755" in line and not (tmp_path / "b").exists()
    place.chmod(0o700)
    code, lines = run("reshard", "--from", a, "--to", tmp_path / "b")
    assert code == 0 and f"{EDGE_KEY}, the key of the edge's layers, is copied, too" in lines[1]
    assert read_kept_key(tmp_path / "b", "--load") == bytes(range(32))


def test_torch_reads_what_was_written(run: Run, tmp_path: Path) -> None:
    """With its own reader, into whole tensors, and what all ranks share as it was, but for the optimizer."""
    model = make_model()
    a = by_bucket(tmp_path / "a", model, is_older=True)
    run("reshard", "--from", a, "--to", tmp_path / "b")
    b = tmp_path / "b" / "iter_0000003"
    state = {
        f"optimizer.state.{state}.{name}": torch.zeros(shape)
        for state in ("param", "exp_avg")
        for name, shape in SHAPES.items()
    }
    state[QKV] = torch.zeros(SHAPES[QKV])
    dcp.load(state, storage_reader=FileSystemReader(b))
    assert torch.equal(state[QKV], model.weights[QKV])
    for (kind, name), value in model.states.items():
        assert kind == "exp_avg_sq" or torch.equal(state[f"optimizer.state.{kind}.{name}"], value)
    before, after = (torch.load(folder / "common.pt", weights_only=False) for folder in (a, b))
    assert after["args"] == before["args"] and after["args"].device is torch.float32
    assert after.keys() == before.keys() and after["iteration"] == 3


def test_a_chain_of_optimizers_has_groups_of_its_own(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights and experts, as Megatron stores them: with a number before the keys of each."""
    from tests.support import checkpoints

    original = checkpoints.Writer.object

    def numbered(self: checkpoints.Writer, key: str, value: Any, rank: int = 0) -> None:
        if ".optimizer/" in key:
            for number in (0, 1):
                group = {"is_expert_parallel": bool(number), **value["param_groups"][0]}
                original(self, f"chained_{number}.{key}", {"param_groups": [group]}, rank)
        else:
            original(self, key, value, rank)

    def common(model: Model, form: str, **optimizer: Any) -> dict[str, Any]:
        optimizers = {number: {"param_state_sharding_type": form} for number in (0, 1)}
        return {"optimizer": optimizers, "content_metadata": {"distrib_optim_sharding_type": form}}

    monkeypatch.setattr(checkpoints.Writer, "object", numbered)
    monkeypatch.setattr(checkpoints, "_common", common)
    a = by_bucket(tmp_path / "iter_0000100", make_model())
    assert run("reshard", "--from", a, "--to", tmp_path / "b")[0] == 0
    stored = Contents(tmp_path / "b" / "iter_0000100").common["optimizer"]
    for number, state in stored.items():
        (group,) = state["optimizer"]["param_groups"]
        assert group["is_expert_parallel"] is bool(number) and group["step"] == 3.0
        assert state["param_state_sharding_type"] == "fully_reshardable"
    assert run("diff", a, tmp_path / "b")[0] == 0


class StoppedError(BaseException):
    """Stands for a machine that goes down."""


def _stop_at(monkeypatch: pytest.MonkeyPatch, count: int, *, is_torn: bool) -> None:
    """Stop at a piece, of which some bytes may be written."""
    original = PieceWriter._write_piece
    left = [count]

    def write(self: PieceWriter, piece: NewPiece, file: BinaryIO) -> None:
        left[0] -= 1
        if left[0] >= 0:
            original(self, piece, file)
            return
        if is_torn:
            file.write(b"PK and some more")
        raise StoppedError

    monkeypatch.setattr(PieceWriter, "_write_piece", write)


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.parametrize("is_torn", [False, True])
def test_what_was_stopped_goes_on(run: Run, tmp_path: Path, count: int, is_torn: bool) -> None:
    a = by_bucket(tmp_path / "a", make_model())
    run("reshard", "--from", a, "--to", tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        _stop_at(patch, count, is_torn=is_torn)
        run("reshard", "--from", a, "--to", tmp_path / "b")
    half, whole = tmp_path / "b" / "partial_iter_0000003", tmp_path / "b" / "iter_0000003"
    assert (
        not whole.exists()
        and not (tmp_path / "b" / "latest_checkpointed_iteration.txt").exists()
        and not (half / "metadata.json").exists()
    )
    if is_torn:
        with (half / JOURNAL).open("a") as journal:
            journal.write('["decoder.la')
    before = (half / "__0_0.distcp").read_bytes()
    code, lines = run("reshard", "--from", a, "--to", tmp_path / "b", "--json")
    told = json.loads("\n".join(lines))
    assert code == 0 and (told["num_bytes_found"] > 0) == (count > 0) and told["num_bytes_found"] < told["num_bytes"]
    assert _bytes_of(whole) == _bytes_of(tmp_path / "whole" / "iter_0000003") and not half.exists()
    assert (
        (whole / "__0_0.distcp").read_bytes().startswith(before if not is_torn else before[: -len("PK and some more")])
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None], ids=["SIGINT", "SIGTERM", "full"])
def test_what_stops_it_is_one_line_and_the_same_command_goes_on(run: Run, tmp_path: Path, number: int | None) -> None:
    a = by_bucket(tmp_path / "a", make_model())
    run("reshard", "--from", a, "--to", tmp_path / "whole")
    left = [60]  # writes, of which the last is in the midst of an archive: torch makes another error of what is raised

    def happen() -> None:
        left[0] -= 1
        if left[0] <= 0:
            if number is None:
                raise OSError(28, "No space left on device")
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        happens_in_writes(patch, happen)
        code, (line,) = run("reshard", "--from", a, "--to", tmp_path / "b")
    why = "cannot be written: No space left on device" if number is None else "was not written to its end: stopped"
    assert code == 2 and why in line and line.count(";") == 1 and line.endswith("it resumes"), line
    assert run("reshard", "--from", a, "--to", tmp_path / "b")[0] == 0
    whole, found = (_bytes_of(tmp_path / name / "iter_0000003") for name in ("whole", "b"))
    assert whole == found


def test_a_folder_in_which_a_run_saves_is_left_alone(run: Run, tmp_path: Path) -> None:
    a, b = by_bucket(tmp_path / "a", make_model()), tmp_path / "b"
    hold = "import sys, time; from pathlib import Path; from vtp_plugin.checkpoint.save.saving import FolderLock\n"
    hold += "lock = FolderLock(Path(sys.argv[1]), {}, 0.0); print('held', flush=True); time.sleep(600)"
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    other = subprocess.Popen([sys.executable, "-c", hold, str(b)], stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        code, (line,) = run("reshard", "--from", a, "--to", b)
        assert code == 2 and f"--to {b} belongs to another run, process {other.pid} on " in line
        assert line.endswith("; give another folder, or end that run")
        assert run("reshard", "--from", a, "--to", tmp_path / "c")[0] == 0
    finally:
        other.kill()
        other.communicate()
    assert run("reshard", "--from", a, "--to", b)[0] == 0
    assert sorted(path.name for path in b.iterdir()) == ["iter_0000003", "latest_checkpointed_iteration.txt"]


def test_what_a_tool_writes_beside_checkpoints_is_no_stopped_save(tmp_path: Path) -> None:
    for name in ("partial_exported", "partial_iter_0000003", "partial_removed_1f", "partial_release"):
        (tmp_path / name).mkdir()
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["partial_exported"]


def test_pieces_that_are_not_whole_are_written_again(run: Run, tmp_path: Path) -> None:
    a = by_bucket(tmp_path / "a", make_model())
    run("reshard", "--from", a, "--to", tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        _stop_at(patch, 20, is_torn=False)
        run("reshard", "--from", a, "--to", tmp_path / "b")
    half, whole = tmp_path / "b" / "partial_iter_0000003", tmp_path / "b" / "iter_0000003"
    file = half / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:9000])
    assert run("reshard", "--from", a, "--to", tmp_path / "b")[0] == 0
    assert _bytes_of(whole) == _bytes_of(tmp_path / "whole" / "iter_0000003")


def test_files_and_pieces_are_small(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = by_bucket(tmp_path / "a", make_model(), ranks=4)
    monkeypatch.setattr("vtp_plugin.checkpoint.tools.writer._FILE_BYTES", 20000)
    for module in ("tools.writer", "load.stored_optimizer"):
        monkeypatch.setattr(f"vtp_plugin.checkpoint.{module}.SLAB_BYTES", 20)
    assert run("reshard", "--from", a, "--to", tmp_path / "b")[0] == 0
    b = Contents(tmp_path / "b" / "iter_0000003")
    assert len({extent.file for _, extent in b.index.extents()}) > 3
    assert len(b.index.tensors[f"optimizer.state.exp_avg.{QKV}"].extents) == 24
    assert run("diff", a, tmp_path / "b")[0] == run("verify", b.folder)[0] == 0


def test_it_is_refused_where_it_makes_no_sense(run: Run, tmp_path: Path) -> None:
    a = by_bucket(tmp_path / "a", make_model())

    def refusal(source: Path, target: Path) -> str:
        code, (line,) = run("reshard", "--from", source, "--to", target)
        assert code == 2 and line.count(";") >= 2
        return line

    unknown = by_name(tmp_path / "unknown", make_model(), form="spread_by_moonlight")
    assert "holds the optimizer as spread_by_moonlight; this version knows plain, dp_resh" in refusal(unknown, tmp_path)
    assert "is no folder; a checkpoint is one" in refusal(tmp_path / "none", tmp_path / "b")
    (tmp_path / "full" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "full" / "iter_0000003" / "x").touch()
    assert "is not empty; nothing is overwritten" in refusal(a, tmp_path / "full")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoppedError):
        _stop_at(patch, 3, is_torn=False)
        run("reshard", "--from", a, "--to", tmp_path / "half")
    other = by_bucket(tmp_path / "other", make_model(1), ranks=4)
    assert "holds a part of another checkpoint; only one of" in refusal(other, tmp_path / "half")
    assert run("reshard", "--from", a, "--to", tmp_path / "half")[0] == 0
    assert "holds a checkpoint; none is overwritten" in refusal(a, tmp_path / "half")
    (a / MAP).unlink()
    assert f"{MAP} is missing" in refusal(a, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def _older_buckets(folder: Path, model: Model) -> Path:
    """As this plugin has Megatron 0.12 write it, where stages are of different sizes."""
    from tests.support import checkpoints

    with pytest.MonkeyPatch.context() as patch:
        common = {
            "args": argparse.Namespace(ckpt_fully_parallel_save=False, vtp_size_list=[1, 2]),
            "iteration": 3,
            "optimizer": {"param_state_sharding_type": BY_BUCKET_OLDER, "param_state": {0: {"padding": 1}}},
        }
        patch.setattr(checkpoints, "_common", lambda *_: common)
        return by_bucket(folder, model, is_older=True)


def _stock_model() -> Model:
    return make_model(dtype=torch.bfloat16, shapes=STOCK_SHAPES)


FORMS = {
    PLAIN: lambda folder: by_name(folder, make_model(), form=PLAIN),
    IN_MODEL_SPACE: lambda folder: by_name(folder, make_model()),
    BY_BLOCK: lambda folder: by_block(folder, make_model(), is_older=True),
    BY_BUCKET_OLDER: lambda folder: _older_buckets(folder, make_model()),
    BY_RANK: lambda folder: by_rank(folder, _stock_model()),
}


@pytest.mark.parametrize(
    ("form", "extra", "made"),
    [
        (PLAIN, [], PLAIN),
        (IN_MODEL_SPACE, [], IN_MODEL_SPACE),
        (BY_BLOCK, [], BY_BLOCK),
        (BY_BLOCK, ["--form", IN_MODEL_SPACE], IN_MODEL_SPACE),
        (BY_BUCKET_OLDER, [], BY_BLOCK),
        (BY_BUCKET_OLDER, ["--form", IN_MODEL_SPACE], IN_MODEL_SPACE),
        (BY_RANK, [], BY_BLOCK),
        (BY_RANK, ["--form", IN_MODEL_SPACE], IN_MODEL_SPACE),
    ],
)
def test_every_form_is_written_again(run: Run, tmp_path: Path, form: str, extra: list[str], made: str) -> None:
    """The same state by name; what has the form already is the same bytes, piece by piece."""
    a = FORMS[form](tmp_path / "a")
    assert Contents(a).form == form
    code, lines = run("reshard", "--from", a, "--to", tmp_path / "b", *extra)
    b = tmp_path / "b" / "iter_0000003"
    assert code == 0 and lines[0].startswith(f"wrote {b}: ")
    assert (f"the optimizer was {form} before, and is copied: any layout loads that" in lines) == (form == made)
    assert run("diff", a, b)[0] == run("verify", b)[0] == 0
    before, contents = Contents(a), Contents(b)
    assert contents.form == made
    assert contents.index.tensors.keys() == before.index.tensors.keys() or form != made
    if form == made:
        read = [{key: _pieces_of(each, key) for key in each.index.tensors} for each in (before, contents)]
        assert read[0] == read[1]
        return
    assert not any("dp_group_idx" in key for key in (*contents.index.tensors, *contents.index.objects))
    stored = contents.common["optimizer"]
    assert stored["param_state_sharding_type"] == made and "param_state" not in stored
    assert stored["optimizer"]["param_groups"] == [{"wd_mult": 1.0, "lr_mult": 1.0, "step": 3.0}]
    content = contents.common.get("content_metadata", {})
    assert content.get("distrib_optim_sharding_type") == (made if made == IN_MODEL_SPACE else None)
    # Megatron 0.12 asks the argument for the form.
    assert made == IN_MODEL_SPACE or contents.arguments["ckpt_fully_parallel_save"] is True
    assert contents.arguments.get("no_save_rng", False) is (form == BY_BUCKET_OLDER)


def _pieces_of(contents: Contents, key: str) -> dict[Any, bytes]:
    tensor = contents.index.tensors[key]

    def read(extent: Extent) -> bytes:
        with (contents.folder / extent.file).open("rb") as file:
            file.seek(extent.offset)
            return file.read(extent.length)

    return {(tensor.flattened, box): read(extent) for box, extent in tensor.extents}


def test_blocks_are_those_of_megatron(run: Run, tmp_path: Path) -> None:
    """Of each layer those of the ranks, and flat; torch reads them so, and Megatron finds the shape that they had."""
    model = make_model()
    run("reshard", "--from", _older_buckets(tmp_path / "a", model), "--to", tmp_path / "b")
    b = tmp_path / "b" / "iter_0000003"
    names = {f"optimizer.state.{state}.{QKV}": state for state in ("fp32_param", "exp_avg", "exp_avg_sq")}
    state = {key: torch.zeros(2, 2, 1, 24) for key in names}
    dcp.load(state, storage_reader=FileSystemReader(b))
    for key, name in names.items():
        wanted = model.states[name.replace("fp32_param", "param"), QKV]
        assert torch.equal(state[key], wanted.reshape(2, 2, 1, 24))
    index: Any = FileSystemReader(b).read_metadata()
    assert {key: index.mcore_data[key] for key in names} == {
        key: {"nd_reformulated_orig_global_shape": SHAPES[QKV]} for key in names
    }


@pytest.mark.parametrize("bucket_size", [None, 100, 300, 900])
def test_buckets_that_are_stored_as_one_are_told_apart(run: Run, tmp_path: Path, bucket_size: int | None) -> None:
    a = by_rank(tmp_path / "a", _stock_model(), bucket_size=bucket_size)
    assert run("diff", a, by_name(tmp_path / "b", _stock_model()))[0] == 0


def test_what_is_not_where_it_should_be_is_refused(run: Run, tmp_path: Path) -> None:
    """Two parameters of one size change places; and one that is too long for what is stored."""
    names = ["decoder.layers.mlp.linear_fc1.weight", "decoder.layers.mlp.linear_fc2.weight"]
    swapped = [names[::-1][names.index(name)] if name in names else name for name in STOCK_SHAPES]
    a = by_rank(tmp_path / "a", _stock_model(), order=swapped)
    code, (line,) = run("reshard", "--from", a, "--to", tmp_path / "b")
    assert code == 2 and "cannot be worked out: " in line and "is not its master weight, rounded" in line
    missing = by_rank(tmp_path / "c", _stock_model(), order=[name for name in STOCK_SHAPES if "linear_qkv" not in name])
    code, (line,) = run("reshard", "--from", missing, "--to", tmp_path / "b")
    assert code == 2 and "cannot be worked out: " in line and line.count(";") >= 2
    assert not (tmp_path / "b").exists()


def test_a_form_that_a_checkpoint_cannot_take_is_refused(run: Run, tmp_path: Path) -> None:
    newer = by_bucket(tmp_path / "newer", make_model())
    code, (line,) = run("reshard", "--from", newer, "--to", tmp_path / "b", "--form", BY_BLOCK)
    assert code == 2 and f"holds the optimizer as dp_reshardable; of that nothing is made {BY_BLOCK}; leave" in line
    plain = FORMS[PLAIN](tmp_path / "plain")
    code, (line,) = run("reshard", "--from", plain, "--to", tmp_path / "b", "--form", IN_MODEL_SPACE)
    assert code == 2 and "holds the optimizer as plain; of that nothing is made fully_reshardable" in line


def test_a_checkpoint_without_an_optimizer_is_copied(run: Run, tmp_path: Path) -> None:
    bare = make_model()
    bare.states = {}
    a = by_name(tmp_path / "a", bare)
    code, lines = run("reshard", "--from", a, "--to", tmp_path / "b")
    assert code == 0 and lines[1] == "there is no optimizer: any layout loads that"
    assert run("diff", a, tmp_path / "b", "--weights-only")[0] == 0


def test_objects_are_those_of_the_source(run: Run, tmp_path: Path) -> None:
    """What all ranks share is read from what was written, with torch's own classes."""
    a = by_bucket(tmp_path / "a", make_model())
    run("reshard", "--from", a, "--to", tmp_path / "b")
    b = Contents(tmp_path / "b" / "iter_0000003")
    (place,) = b.index.objects.values()
    with (b.folder / place.file).open("rb") as file:
        file.seek(place.offset)
        (tmp_path / "object").write_bytes(file.read(place.length))
    (read,) = torch.load(tmp_path / "object", weights_only=False)
    assert read["args"].tensor_model_parallel_size == 2 and read["args"].device is torch.float32
    (inert,) = load_object(tmp_path, Extent("object"))
    assert inert["args"].state["tensor_model_parallel_size"] == 2


MEASURE = """
import resource, sys, torch
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.cli import main
import vtp_plugin.checkpoint.tools.compare_checkpoints, vtp_plugin.checkpoint.tools.rewrite_optimizer
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main(sys.argv[1:])
except SystemExit as left:
    assert left.code == 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("write", "extra"),
    [
        pytest.param(partial(by_bucket, ranks=2, axis=0, dp=8), [], id="buckets"),
        pytest.param(partial(by_block, ranks=2), ["--form", IN_MODEL_SPACE], id="blocks"),
        pytest.param(by_rank, [], id="ranks"),
    ],
)
def test_memory_is_that_of_a_piece(tmp_path: Path, write: Callable[..., Path], extra: list[str]) -> None:
    """In a process of its own; what is compared and written is larger than what may be in memory."""
    shapes = {"embedding.word_embeddings.weight": (8192, 1024), QKV: (2, 8192, 1024)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.checkpoints.STOCK_SHAPES", shapes)
        a = write(tmp_path / "a", make_model(shapes=shapes))
    # An object of a rank holds all of its optimizer, of which a piece is read at a time.
    extents = [extent.length or 0 for tensor in Contents(a).index.tensors.values() for _, extent in tensor.extents]
    largest = max(extents) / 2**20
    reshard = ["reshard", "--from", str(a), "--to", str(tmp_path / "b"), *extra]
    for words in (reshard, ["diff", str(a), str(tmp_path / "b")]):
        command = [sys.executable, "-c", MEASURE, "checkpoint", *words]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, check=True, env={"PYTHONPATH": PYTHON_PATH}
        )
        assert float(done.stdout.split()[-1]) <= largest + 64, (done.stdout, largest)
