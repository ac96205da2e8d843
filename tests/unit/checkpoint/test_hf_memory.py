"""What an import and an export hold in memory: some slabs, however large the model is."""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path

import pytest

from tests.support.pool import start_python

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch", reason="published models need it: vtp-plugin[hf]")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc counts what is mapped, others do not"),
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
# The C library counts what it maps, and keeps the most of it: with a low threshold that is every slab, by whoever asked
# for it, to the byte. What small objects took, and Python's own arenas, is what the process has grown by at the end.
MEASURE = """
import ctypes, os, re, sys
libc = ctypes.CDLL(None)
assert libc.mallopt(-3, 1 << 16) == 1  # M_MMAP_THRESHOLD, which then stays as it is
from vtp_plugin.cli import main
import vtp_plugin.checkpoint.tools.export_hf, vtp_plugin.checkpoint.tools.import_hf, safetensors

class Counts(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc.mallinfo2.restype = Counts

def own_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1))

own, mapped = own_bytes(), libc.mallinfo2().hblkhd
main(["checkpoint", *sys.argv[1:], "--json"])
print("from", mapped, own, "to", own_bytes(), flush=True)
os.dup2(1, 2)
libc.malloc_stats()
"""
READ = re.compile(r"from (\d+) (\d+) to (\d+)\n.*^max mmap bytes *= *(\d+)", re.DOTALL | re.MULTILINE)


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
    """Run an action in a process of its own, and return by how much it grew at most beyond what imports took."""
    found = READ.search(start_python("-c", MEASURE, *map(str, words)))
    assert found is not None
    mapped, own, end, most = map(int, found.groups())
    return most - mapped + max(0, end - own)


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
