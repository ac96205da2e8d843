"""What an import and an export hold in memory: some slabs, however large the model is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.pool import start_python

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="published models need it: vtp-plugin[hf]")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read in /proc, which Linux has"),
]
MIB = 1 << 20
HIDDEN, FFN, WORDS = 1024, 4096, 32768
LARGEST_BYTES = 2 * WORDS * HIDDEN  # the embedding in bf16, 64 MiB
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "vocab_size": WORDS,
    "tie_word_embeddings": False,
}
# A thread looks while the action runs at memory of the process's own: files that are mapped may be dropped at any time.
MEASURE = """
import re, sys, threading
from vtp_plugin.cli import main
import vtp_plugin.offline.export_published, vtp_plugin.offline.import_published, safetensors

def own_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1))

most, end, before = [0], threading.Event(), own_bytes()
def watch():
    while not end.wait(0.002):
        most[0] = max(most[0], own_bytes())

thread = threading.Thread(target=watch)
thread.start()
main(["checkpoint", *sys.argv[1:], "--json"])
end.set()
thread.join()
print("grown by", max(most[0], own_bytes()) - before)
"""


def make(folder: Path, num_layers: int) -> int:
    """Write a model, one file for each layer, and return its bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
    keys = HIDDEN // 2
    ends = {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN)}
    files = {"ends.safetensors": {**ends, "model.norm.weight": (HIDDEN,)}}
    for layer in range(num_layers):
        inner = {
            **{f"self_attn.{name}_proj": (HIDDEN, HIDDEN) for name in "qo"},
            **{f"self_attn.{name}_proj": (keys, HIDDEN) for name in "kv"},
            **{f"mlp.{name}_proj": (FFN, HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj": (HIDDEN, FFN),
            **{f"{name}_layernorm": (HIDDEN,) for name in ("input", "post_attention")},
        }
        files[f"layer_{layer}.safetensors"] = {
            f"model.layers.{layer}.{name}.weight": shape for name, shape in inner.items()
        }
    for name, shapes in files.items():
        held = {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}
        safetensors.save_file(held, folder / name, {"format": "pt"})
    places = {key: name for name, shapes in files.items() for key in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum((folder / name).stat().st_size for name in files)


def growth_bytes(*words: object) -> int:
    """Run an action in a process of its own, and return by how much it grew beyond what imports took."""
    return int(start_python("-c", MEASURE, *map(str, words)).rpartition("grown by ")[2])


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """At two sizes less than the largest tensor twice, and about as much."""
    grown: dict[int, tuple[int, int]] = {}
    for num_layers in (4, 16):
        source, middle, back = (tmp_path / f"{name}_{num_layers}" for name in ("source", "middle", "back"))
        size = make(source, num_layers)
        grown[size] = (
            growth_bytes("import", "--hf", source, "--to", middle),
            growth_bytes("export", "--from", middle, "--hf", back),
        )
        for file in sorted(source.glob("*.safetensors")):
            wanted = safetensors.load_file(file)
            found = safetensors.load_file(back / "model.safetensors")
            assert all(torch.equal(found[key], value) for key, value in wanted.items())
            break
    small, large = sorted(grown)
    assert large - small > 2 * LARGEST_BYTES
    print({f"{size / MIB:.0f} MiB": [f"{each / MIB:.0f} MiB" for each in both] for size, both in grown.items()})
    for way in (0, 1):
        assert grown[large][way] <= 2 * LARGEST_BYTES, grown
        assert grown[large][way] <= grown[small][way] + LARGEST_BYTES / 4, grown
