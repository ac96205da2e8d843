"""Bad input of ``checkpoint import`` and ``export``: one line, and nothing half-written; what was killed goes on."""

from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import happens_in_writes, run_action
from tests.support.hf_models import KINDS, SMALL, config_of, edit, imported, make, torch
from tests.support.hosts import PYTHON_PATH


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in two files."""
    folder = tmp_path_factory.mktemp("published")
    make(KINDS["llama-3"], folder, max_shard="100KB", **SMALL)
    return folder


def _no_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json is missing or cannot be read"


def _no_shard(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.unlink()
    return f"{file.name} is missing; model.safetensors.index.json names it"


def _cut_shard(folder: Path) -> str:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-10])
    return f"{file.name} is damaged"


def _torn_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [')
    return "model.safetensors.index.json is damaged"


def _no_weights(folder: Path) -> str:
    for file in folder.glob("*safetensors*"):
        file.unlink()
    return "holds neither model.safetensors nor model.safetensors.index.json"


def _other_shape(folder: Path) -> str:
    edit(folder / "config.json", intermediate_size=100)
    return r"model.layers.0.mlp.gate_proj.weight has the shape (96, 48), and (100, 48) is expected"


def _more_layers(folder: Path) -> str:
    edit(folder / "config.json", num_hidden_layers=3)
    return "model.layers.2.input_layernorm.weight is missing"


def _fewer_layers(folder: Path) -> str:
    edit(folder / "config.json", num_hidden_layers=1)
    return "model.layers.1.input_layernorm.weight is no tensor of a model of the family llama"


def _other_type(folder: Path) -> str:
    _change(folder, "model.layers.1.mlp.down_proj.weight", lambda value: value.half())
    return "have the types float16 and float32"


def _eight_bits(folder: Path) -> str:
    _change(folder, "model.layers.1.mlp.down_proj.weight", lambda value: value.to(torch.int8))
    return "has the type I8; weights are BF16, F16, F32, and quantised ones are not read"


def _other_family(folder: Path) -> str:
    edit(folder / "config.json", model_type="gpt2")
    return "model_type is 'gpt2'; known are llama, mistral"


def _new_field(folder: Path) -> str:
    edit(folder / "config.json", layer_scale=0.5)
    return "layer_scale is 0.5, and no field of llama that is known"


def _change(folder: Path, name: str, change: Any) -> None:
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            save_file({**tensors, name: change(tensors[name])}, file, {"format": "pt"})


@pytest.mark.parametrize(
    "spoil",
    [
        *(_no_config, _no_shard, _cut_shard, _torn_index, _no_weights),
        *(_other_shape, _more_layers, _fewer_layers, _other_type, _eight_bits),
        *(_other_family, _new_field),
    ],
)
def test_a_spoilt_model_is_one_line_and_leaves_nothing(
    spoil: Any, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    message = spoil(tmp_path / "model")
    code, lines = run_action(capsys, "import", "--hf", tmp_path / "model", "--to", tmp_path / "to")
    assert code == 2 and len(lines) == 1 and message in lines[0], lines
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_nothing_is_overwritten(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").touch()
    run = partial(run_action, capsys)
    code, (line,) = run("import", "--hf", model_folder, "--to", tmp_path / "to")
    assert code == 2 and f"{tmp_path / 'to'} is not empty; nothing is overwritten" in line
    (tmp_path / "to" / "mine").unlink()
    imported(model_folder, tmp_path / "to", capsys)
    code, (line,) = run("export", "--from", tmp_path / "to", "--hf", tmp_path / "to")
    assert code == 2 and "is not empty" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["to"]


class StoppedError(BaseException):
    """Stands for a process that is killed: no handler of errors sees it."""


def test_what_was_killed_goes_on(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stands in its place before; the same command then writes what is missing."""
    from vtp_plugin.checkpoint.tools.writer import PieceWriter

    imported(model_folder, tmp_path / "whole", capsys)
    original, left = PieceWriter._write_piece, [10]

    def write(self: Any, *args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise StoppedError
        original(self, *args)

    monkeypatch.setattr(PieceWriter, "_write_piece", write)
    with pytest.raises(StoppedError):
        imported(model_folder, tmp_path / "to", capsys)
    assert not (tmp_path / "to" / "release").exists()
    assert not (tmp_path / "to" / "latest_checkpointed_iteration.txt").exists()
    imported(model_folder, tmp_path / "to", capsys)
    total = left[0]
    assert -total < 40 and {path.name for path in tmp_path.iterdir()} == {"whole", "to"}
    for name in (".metadata", "__0_0.distcp", "metadata.json", "vtp_model.json", "vtp_manifest.json"):
        assert filecmp.cmp(tmp_path / "to/release" / name, tmp_path / "whole/release" / name, shallow=False), name


AMIDST = 52  # a write in which torch has written some of an archive, and says that its end is not where it must be


def test_a_full_disk_is_one_line_and_leaves_nothing(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [AMIDST]

    def full() -> None:
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(28, "No space left on device")

    happens_in_writes(monkeypatch, full)
    code, (line,) = run_action(capsys, "import", "--hf", model_folder, "--to", tmp_path / "to")
    assert code == 2 and "cannot be written: No space left on device" in line and not [*tmp_path.iterdir()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("action", ["import", "export"])
def test_what_was_stopped_is_one_line_and_leaves_nothing(
    action: str,
    number: signal.Signals,
    model_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C, or the end of a job, in the midst of the elements; nothing stops it while it cleans up."""
    from vtp_plugin.checkpoint.tools import export_hf

    imported(model_folder, tmp_path / "start", capsys)
    left, removed = [AMIDST if action == "import" else 1], []

    def stop_once(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    if action == "import":
        happens_in_writes(monkeypatch, stop_once)
    else:
        monkeypatch.setattr(export_hf, "write_header", stop_once)

    def remove(folder: Path, **options: Any) -> None:
        os.kill(os.getpid(), number)
        removed.append(folder.name)
        remove_really(folder, **options)

    remove_really = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    words = {
        "import": ("--hf", model_folder, "--to", tmp_path / "new" / "out"),
        "export": ("--from", tmp_path / "start", "--hf", tmp_path / "new" / "out"),
    }
    before = signal.signal(number, lambda *_: pytest.fail("nobody heard it"))
    try:
        code, (line,) = run_action(capsys, action, *words[action])
    finally:
        signal.signal(number, before)
    assert code == 2 and f"{tmp_path / 'new' / 'out'} was not written to its end: stopped by" in line
    assert left[0] <= 0 and removed and [path.name for path in tmp_path.iterdir()] == ["start"]


def test_another_checkpoint_is_refused(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Other sizes, other flags of the run, tensors that no published model has, adapters, fewer words."""
    start = tmp_path / "start"
    imported(model_folder, start, capsys)

    def refusal(like: Path) -> str:
        code, lines = run_action(capsys, "export", "--from", start, "--hf", tmp_path / "out", "--like", like)
        assert code == 2 and len(lines) == 1 and not (tmp_path / "out").exists(), lines
        return lines[0]

    for name, fields in {
        "theta": {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 1e4, "rope_scaling": None},
        "ffn": {"intermediate_size": 100},
        "words": {"vocab_size": 71},
        "tied": {"tie_word_embeddings": True},
    }.items():
        shutil.copytree(model_folder, tmp_path / name)
        edit(tmp_path / name / "config.json", **fields)
    assert "--rotary-base is 500000, and 10000 is expected" in refusal(tmp_path / "theta")
    assert "--ffn-hidden-size is 96, and 100 is expected" in refusal(tmp_path / "ffn")
    assert "embedding.word_embeddings.weight has the shape (70, 48), and (71, 48) is expected" in refusal(
        tmp_path / "words"
    )
    assert "--untie-embeddings-and-output-weights is given, and is not expected" in refusal(tmp_path / "tied")
    shutil.rmtree(start / "hugging_face")
    code, (line,) = run_action(capsys, "export", "--from", start, "--hf", tmp_path / "out")
    assert code == 2 and "was not imported here, nor was what its run loaded" in line and "--like" in line


def test_adapters_are_merged_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.support.checkpoints import Writer

    writer = Writer(tmp_path / "tuned")
    writer.tensor("decoder.layers.self_attention.linear_qkv.lora_A.default.weight", (2, 4), (0, 0), torch.ones(2, 4), 0)
    writer.finish({"args": None})
    config_of(KINDS["llama-3"], architectures=None, **SMALL).save_pretrained(tmp_path / "like")
    code, lines = run_action(
        capsys, "export", "--from", tmp_path / "tuned", "--hf", tmp_path / "out", "--like", tmp_path / "like"
    )
    assert code == 2 and "lora_A.default.weight belongs to an adapter" in lines[0] and "merge it first" in lines[0]


def test_a_checkpoint_of_one_file_for_each_rank_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The format torch: its name, and what can be done."""
    (tmp_path / "saved" / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    for folder in (tmp_path / "saved", tmp_path / "saved" / "iter_0000002"):
        code, (line,) = run_action(capsys, "export", "--from", folder, "--hf", tmp_path / "out")
        assert code == 2 and "has the format torch, one file for each rank" in line and "torch_dist" in line
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_folder_in_which_a_run_saves_is_not_imported_to(
    capsys: pytest.CaptureFixture[str], model_folder: Path, tmp_path: Path, is_alive: bool
) -> None:
    """A run that has not saved yet has only its lock there; what a killed import has left is no hindrance."""
    to = tmp_path / "to"
    hold = "import sys, time; from pathlib import Path; from vtp_plugin.checkpoint.save.saving import FolderLock\n"
    hold += "lock = FolderLock(Path(sys.argv[1]), {}, 0.0); print('held', flush=True); time.sleep(600)"
    env = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    other = subprocess.Popen([sys.executable, "-c", hold, str(to)], stdout=subprocess.PIPE, text=True, env=env)
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    try:
        if not is_alive:
            other.kill()
            other.wait()
        code, lines = run_action(capsys, "import", "--hf", model_folder, "--to", to)
    finally:
        other.kill()
        other.communicate()
    if is_alive:
        assert code == 2 and f"--to {to} belongs to another run, process {other.pid} on " in lines[0]
        assert [path.name for path in to.iterdir()] == ["vtp_lock.json"]
    else:
        assert code == 0 and not (to / "vtp_lock.json").exists()
