"""What import reads although it is not spelt as transformers writes it: as transformers reads it, to the last bit."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import run_action
from tests.support.hf_models import KINDS, SMALL, edit, imported, load, logits_of, make, run_json, tensors_of, torch
from tests.support.hosts import ROOT
from vtp_plugin.checkpoint.hf.read_config import file_of
from vtp_plugin.errors import ConfigError

safetensors_of = pytest.importorskip("safetensors.torch")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FREQUENCIES = "rotary_emb.inv_freq"
FUSED = (("gate_up_proj", ("gate_proj", "up_proj"), ("w1", "w3")), ("down_proj", ("down_proj",), ("w2",)))


def _fused(tensors: dict[str, Any]) -> None:
    """Let all experts of a layer be one tensor, as transformers 5 has them while it computes."""
    for old, new in (("block_sparse_moe.gate", "mlp.gate"),):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)
    for layer in range(SMALL["num_hidden_layers"]):
        for made, ours, mixtral in FUSED:
            folder, parts = f"model.layers.{layer}.mlp.experts", ours
            if any(f"model.layers.{layer}.block_sparse_moe." in name for name in tensors):
                folder, parts = f"model.layers.{layer}.block_sparse_moe.experts", mixtral
            experts = [torch.cat([tensors.pop(f"{folder}.{i}.{part}.weight") for part in parts]) for i in range(6)]
            tensors[f"model.layers.{layer}.mlp.experts.{made}"] = torch.stack(experts)


def _without_base(tensors: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def _head_only(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


def _both(tensors: dict[str, Any]) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def _frequencies(dtype: Any) -> Callable[[dict[str, Any]], None]:
    def put(tensors: dict[str, Any]) -> None:
        values = (500000.0 ** -torch.arange(0, 1, 0.25, dtype=torch.float64)).to(dtype)
        for layer in range(SMALL["num_hidden_layers"]):
            tensors[f"model.layers.{layer}.self_attn.{FREQUENCIES}"] = values.clone()

    return put


@pytest.mark.parametrize(
    ("kind", "respell"),
    [
        pytest.param("qwen-3-moe", _fused, id="fused"),
        pytest.param("mixtral", _fused, id="fused-mixtral"),
        pytest.param("llama-2", _without_base, id="without-base"),
        pytest.param("qwen-2.5-tied", _without_base, id="tied-without-base"),
        pytest.param("qwen-2.5-tied", _head_only, id="head-only"),
        pytest.param("llama-3-tied", _both, id="both"),
    ],
)
def test_other_spellings(
    kind: str, respell: Callable[[dict[str, Any]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers misses nothing of such a file; the export of its import is the model as it was."""
    source, respelt = tmp_path / "source", tmp_path / "respelt"
    model = make(KINDS[kind], source, **SMALL)
    shutil.copytree(source, respelt)
    before = tensors_of(source)
    after = dict(before)
    respell(after)
    assert after.keys() != before.keys()
    safetensors_of.save_file(after, respelt / "model.safetensors", {"format": "pt"})
    tokens = torch.arange(12).view(1, 12).numpy()
    assert (logits_of(load(respelt), tokens) == logits_of(model, tokens)).all()
    imported(respelt, tmp_path / "start", capsys)
    run_json(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert back.keys() == before.keys() and all(torch.equal(before[name], back[name]) for name in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frequencies_that_follow_from_the_config_are_left_out(
    dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As files of 2023 hold them."""
    make(KINDS["llama-3"], tmp_path / "source", **SMALL)
    edit(tmp_path / "source" / "config.json", rope_parameters=None, rope_scaling=None, rope_theta=500000.0)
    before = tensors_of(tmp_path / "source")
    tensors = dict(before)
    _frequencies(getattr(torch, dtype))(tensors)
    safetensors_of.save_file(tensors, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    imported(tmp_path / "source", tmp_path / "start", capsys)
    run_json(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "back")
    assert tensors_of(tmp_path / "back").keys() == before.keys()


def test_the_head_is_compared_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slab by slab; the last element of the last one counts."""
    source = tmp_path / "source"
    make(KINDS["llama-3-tied"], source, **SMALL)
    monkeypatch.setattr("vtp_plugin.checkpoint.tools.writer.SLAB_BYTES", 1000)
    tensors = tensors_of(source)
    _both(tensors)
    safetensors_of.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    imported(source, tmp_path / "equal", capsys)
    tensors[HEAD][-1, -1] += 1
    safetensors_of.save_file(tensors, source / "model.safetensors", {"format": "pt"})
    code, (line,) = run_action(capsys, "import", "--hf", source, "--to", tmp_path / "other")
    assert code == 2 and f"{HEAD} differs from {EMBEDDING}" in line


def test_the_cache_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its snapshots are links into blobs, which are followed, and into nothing else."""
    model = tmp_path / "models--some--model"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    make(KINDS["llama-3"], tmp_path / "source", max_shard="100KB", **SMALL)
    (tmp_path / "source" / "LICENSE").write_text("free")
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted((tmp_path / "source").iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    imported(snapshot, tmp_path / "start", capsys)
    (tmp_path / "link").symlink_to(snapshot)
    imported(tmp_path / "link", tmp_path / "linked", capsys)
    run_json(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "back", "--like", snapshot)
    assert (tmp_path / "back" / "LICENSE").read_text() == "free" and not (tmp_path / "back" / "LICENSE").is_symlink()
    load(tmp_path / "back")
    capsys.readouterr()

    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("secret")
    (blobs / "out").symlink_to(tmp_path / "private" / "key")
    other = tmp_path / "models--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("secret")
    for target in ("../../blobs/out", "../../../private/key", "../../../models--other/blobs/x", "../../refs"):
        (snapshot / "NOTICE").unlink(missing_ok=True)
        (snapshot / "NOTICE").symlink_to(target)
        for words in (
            ("import", "--hf", snapshot, "--to", tmp_path / "new"),
            ("export", "--from", tmp_path / "start", "--hf", tmp_path / "new", "--like", snapshot),
        ):
            code, (line,) = run_action(capsys, *words)
            assert code == 2 and "NOTICE is a link that leads out of the folder" in line, line
            assert not (tmp_path / "new").exists()
    shutil.rmtree(blobs)  # blobs as a link to a folder of secrets
    blobs.symlink_to(tmp_path / "private")
    (snapshot / "NOTICE").unlink()
    (snapshot / "NOTICE").symlink_to("../../blobs/key")
    with pytest.raises(ConfigError, match="leads out of the folder"):
        file_of(snapshot, "NOTICE")


def test_a_link_that_export_would_carry_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the folder that an import has left, or that somebody gives; links inside it are files of it."""
    make(KINDS["llama-3"], tmp_path / "source", **SMALL)
    (tmp_path / "source" / "LICENSE.txt").write_text("free")
    (tmp_path / "source" / "LICENSE").symlink_to("LICENSE.txt")
    imported(tmp_path / "source", tmp_path / "start", capsys)
    carried = tmp_path / "start" / "hugging_face"
    assert (carried / "LICENSE").read_text() == "free" and not (carried / "LICENSE").is_symlink()
    (tmp_path / "key").write_text("secret")
    (carried / "tokenizer.json").symlink_to(tmp_path / "key")
    code, (line,) = run_action(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "out")
    assert code == 2 and "tokenizer.json is a link that leads out" in line and not (tmp_path / "out").exists()
    (carried / "tokenizer.json").unlink()
    os.mkfifo(carried / "tokenizer.json")
    code, (line,) = run_action(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "out")
    assert code == 2 and "tokenizer.json cannot be read: it is a FIFO" in line and not (tmp_path / "out").exists()


def test_other_files_beside_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of Mistral's own format, of torch's, and of a trainer; an index of the single file."""
    source = tmp_path / "source"
    make(KINDS["mistral"], source, **SMALL)
    before = tensors_of(source)
    for name in ("consolidated.safetensors", "consolidated-00001-of-00002.safetensors"):
        safetensors_of.save_file({"tok_embeddings.weight": torch.zeros(3)}, source / name)
    (source / "consolidated.safetensors.index.json").write_text("{}")
    for name in ("pytorch_model.bin", "training_args.bin", "params.json", "optimizer.pt"):
        (source / name).write_bytes(b"")
    (source / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(before, "model.safetensors")})
    )
    imported(source, tmp_path / "start", capsys)
    run_json(capsys, "export", "--from", tmp_path / "start", "--hf", tmp_path / "back")
    back = tensors_of(tmp_path / "back")
    assert all(torch.equal(before[name], back[name]) for name in before)


def test_the_example_replaces_only_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--out`` of something else is refused before a file is touched; a new folder, or an empty one, will do."""
    monkeypatch.syspath_prepend(ROOT / "examples")  # as for a script that is started
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "hugging_face.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("all of it")
    (tmp_path / "file").write_text("text")
    for out, words in (("mine", ()), ("file", ()), ("new", ("--hf", str(tmp_path / "new" / "model")))):
        monkeypatch.setattr(sys, "argv", ["hugging_face.py", "--out", str(tmp_path / out), *words])
        with pytest.raises(SystemExit, match=r"; give another"):
            example.main()
    assert (tmp_path / "mine" / "thesis").read_text() == "all of it" and (tmp_path / "file").read_text() == "text"
    (tmp_path / "empty").mkdir()
    for out in ("new", "empty"):
        for _ in range(2):  # the second run replaces what the first has made
            example.begin(tmp_path / out, "hugging_face.py")
            (tmp_path / out / "model").touch()
        assert (tmp_path / out / "model").exists()


def test_a_command_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a folder whose name a shell would take apart."""
    make(KINDS["llama-3"], tmp_path / "source", **SMALL)
    target = tmp_path / "my runs; $HOME"
    code, lines = run_action(capsys, "import", "--hf", tmp_path / "source", "--to", target)
    assert code == 0 and f"load it with --load '{target}', and with:" in lines[0]
    code, lines = run_action(capsys, "reshard", "--from", target, "--to", tmp_path / "it's")
    quoted = str(tmp_path / "it's").replace("'", "'\"'\"'")
    assert code == 0 and lines[0].endswith(f"load it with --load '{quoted}'")
