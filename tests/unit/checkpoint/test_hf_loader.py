"""Imports compared, tensor by tensor, with Megatron's own loader of published models.

Opt-in: ``VTP_MEGATRON_LM`` names a Megatron-LM tree that has ``tools/checkpoint/loader_llama_mistral.py`` (0.12 to
0.17), and transformers 4 and accelerate are installed, which the loader needs.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_models import KINDS, imported, is_new, make, torch
from tests.support.hosts import TREE
from tests.support.pool import start_python
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.load.stored_optimizer import Elements, typed

LOADER = Path(TREE) / "tools" / "checkpoint"
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not TREE or not (LOADER / "loader_llama_mistral.py").is_file(),
        reason="VTP_MEGATRON_LM names no tree with tools/checkpoint/loader_llama_mistral.py",
    ),
    pytest.mark.skipif(is_new(), reason="the loader takes transformers 4 only"),
    pytest.mark.skipif(find_spec("accelerate") is None, reason="the loader needs the package accelerate"),
]
# Runs the loader as its own convert.py does, in a process of its own, and keeps what it sends to a saver.
LOAD = """
import argparse, sys, torch
tree, target, words = sys.argv[1], sys.argv[2], sys.argv[3:]
sys.path[:0] = [tree, f"{tree}/tools/checkpoint"]
import loader_llama_mistral as loader

read = loader.load_args_from_checkpoint

def read_without_fusion(args, size):
    read(args, size)
    # Fusions need a GPU and change no weight; of the last the legacy model asks, and nobody sets it.
    for name in ("apply_rope_fusion", "bias_swiglu_fusion", "gradient_accumulation_fusion", "apply_layernorm_1p"):
        setattr(args, name, False)

loader.load_args_from_checkpoint = read_without_fusion

torch.cuda.current_device = lambda: "cpu"  # of its frequencies

class Queue(list):
    put = list.append

parser = argparse.ArgumentParser()
parser.add_argument("--model-type", default="GPT")
parser.add_argument("--load-dir")
parser.add_argument("--save-dir")
loader.add_arguments(parser)
sent = Queue()
loader.load_checkpoint(sent, parser.parse_args(words))
assert sent[-1] == "done", sent[-1]
torch.save({message.pop("name"): message for message in sent if isinstance(message, dict)}, target)
"""
LAYER = "decoder.layers."


def sent_by_loader(source: Path, target: Path, size: str) -> dict[str, dict[str, Any]]:
    """Let Megatron's loader read a model, and return what it sends, by the name of the message."""
    words = ["--model-size", size, "--checkpoint-type", "hf", "--load-dir", str(source)]
    words += ["--tokenizer-model", str(source), "--make-vocab-size-divisible-by", "1"]
    start_python("-c", LOAD, TREE, str(target), *words, timeout_s=300.0)
    return torch.load(target, weights_only=True)


def whole_tensors(folder: Path) -> dict[str, Any]:
    """Read all weights of a checkpoint."""
    contents = Contents(folder)
    elements, found = Elements(folder), {}
    for name, whole in contents.weights().items():
        value = torch.full(whole.shape, float("nan"))
        for part in whole.parts():
            place = tuple(slice(*pair) for pair in part.box)
            value[place] = typed(elements.read(part, part.box), "float32").reshape(value[place].shape)
        found[name] = value
    return found


def write_tokenizer(folder: Path, num_words: int) -> None:
    """Write a tokenizer of made-up words, which the loader asks for their number."""
    words = {f"w{i}": i for i in range(num_words)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


@pytest.mark.parametrize(
    ("kind", "size"),
    [("llama-3", "llama3"), ("llama-2", "llama3"), ("qwen-2", "qwen2.5"), ("qwen-2.5-tied", "qwen2.5")],
)
def test_an_import_is_what_megatrons_own_loader_makes(
    kind: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tensor of both, bit by bit; a head has the size that the loader takes for granted."""
    source = tmp_path / "source"
    model = make(KINDS[kind], source, head_dim=4, vocab_size=70)
    write_tokenizer(source, 70)
    imported(source, tmp_path / "to", capsys)
    ours = whole_tensors(tmp_path / "to" / "release")
    theirs: dict[str, Any] = {}
    for name, message in sent_by_loader(source, tmp_path / "sent", size).items():
        layer = int(name.split()[-1]) if name.startswith("transformer layer") else None
        for key, value in as_keys(name, message).items():
            if layer is None:
                theirs[key] = value
            else:
                theirs.setdefault(key, []).append(value)
    theirs = {key: torch.stack(value) if isinstance(value, list) else value for key, value in theirs.items()}
    assert ours.keys() == theirs.keys() and (("output_layer.weight" in ours) != model.config.tie_word_embeddings)
    for key, value in theirs.items():
        assert value.dtype == torch.float32 and torch.equal(ours[key], value), key


def as_keys(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Give the tensors of a message their keys in a checkpoint."""
    if name == "embeddings":
        return {"embedding.word_embeddings.weight": message["word embeddings"]}
    if not name.startswith("transformer layer"):
        return {
            {"final norm": "decoder.final_layernorm", "output layer": "output_layer"}[name] + ".weight": message[
                "weight"
            ]
        }
    found = {
        "self_attention.linear_qkv.layer_norm_weight": message["input norm weight"],
        "self_attention.linear_qkv.weight": message["qkv weight"],
        "self_attention.linear_proj.weight": message["dense weight"],
        "mlp.linear_fc1.layer_norm_weight": message["post norm weight"],
        "mlp.linear_fc1.weight": torch.cat([message["mlp l0 weight W"], message["mlp l0 weight V"]]),
        "mlp.linear_fc2.weight": message["mlp l1 weight"],
    }
    if "qkv bias" in message:
        found["self_attention.linear_qkv.bias"] = message["qkv bias"]
    return {LAYER + key: value for key, value in found.items()}
