"""From Hugging Face and back: import a model, train it in stages of different sizes, export it, generate.

    python examples/hugging_face.py                          # a small random Llama, in out/hugging_face
    python examples/hugging_face.py --hf models/Llama-3.2-1B  # one that was published; it must fit into memory
    python examples/hugging_face.py --adapter                 # an adapter (LoRA) over an edge and a cloud; needs peft

With ``--adapter`` the model is frozen and cut as a U: its first and last layers and all samples stay on the edge. Both
sites are on this machine and share a folder of checkpoints. All of it runs on the CPU. Tokens are made up, so what the
model says afterwards means nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from own_folder import begin
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "hugging_face"
SIZE_LIST = "1,2"
SITES = {"edge": 1, "cloud": 2}
"""Ranks of the sites of the U, the edge first."""
U_SHAPE = shlex.split("""
    --layerwise-disaggregated-training --num-layer-list 1,2,1 --vtp-sites edge,cloud
    --vtp-lora-rank 4 --vtp-lora-alpha 8
""")
TRAINING = shlex.split("""
    --micro-batch-size 1 --global-batch-size 4 --seq-length 64 --train-iters 10 --save-interval 10 --lr 1e-4
    --log-interval 1 --eval-interval 100 --eval-iters 0 --mock-data --tokenizer-type NullTokenizer --num-workers 0
    --make-vocab-size-divisible-by 1 --no-save-optim --no-save-rng
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion
    --no-bias-swiglu-fusion --no-masked-softmax-fusion
""")


def main() -> None:
    """Do the four steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", type=Path, help="folder of a model; default: make a small one")
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write to; an earlier run's is replaced")
    parser.add_argument("--adapter", action="store_true", help="train an adapter over an edge and a cloud")
    options = parser.parse_args()
    out = options.out.resolve()
    if options.hf and options.hf.resolve().is_relative_to(out):
        sys.exit(f"--hf {options.hf} lies in --out {out}, which is replaced; give another --out")
    begin(out, Path(__file__).name)
    source = options.hf.resolve() if options.hf else make_model(out / "model")

    print("\n=== 1. Import", flush=True)
    said = json.loads(tool("import", "--hf", source, "--to", out / "imported", "--json"))
    flags = [word for flag in (*said["flags"], *said["free_flags"]) for word in flag.split()]
    print("the model's flags:", *flags)

    where = f"as a U: {', '.join(f'{site} with {number}' for site, number in SITES.items())}" if options.adapter else ""
    print(f"\n=== 2. Train ten steps with --vtp-size-list {SIZE_LIST} {where}".rstrip(), flush=True)
    folders = ["--save", str(out / "trained"), "--load", str(out / ("trained" if options.adapter else "imported"))]
    if options.adapter:
        folders += [*U_SHAPE, "--pretrained-checkpoint", str(out / "imported")]
    sites = SITES if options.adapter else {"": sum(SITES.values())}
    train([*flags, *folders], vocab_size(source), sites)

    print("\n=== 3. Export", flush=True)
    form = ["--peft", out / "exported", "--like", source] if options.adapter else ["--hf", out / "exported"]
    print(tool("export", "--from", out / "trained", *form), end="")

    print("\n=== 4. Generate with transformers", flush=True)
    model = AutoModelForCausalLM.from_pretrained(source if options.adapter else out / "exported").eval()
    if options.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, out / "exported").eval()
    prompt = torch.tensor([[1, 2, 3, 4]])
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    print("tokens:", *tokens[0].tolist())


def make_model(folder: Path) -> Path:
    """Make a small random Llama."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def vocab_size(folder: Path) -> int:
    """Read the size of a model's vocabulary."""
    return json.loads((folder / "config.json").read_text())["vocab_size"]


def tool(*words: object) -> str:
    """Run an action of the tools for checkpoints and return what it prints."""
    command = [sys.executable, "-m", "vtp_plugin", "checkpoint", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    return done.stdout


def train(flags: list[str], num_words: int, sites: dict[str, int]) -> None:
    """Train under one torchrun for each site; print the steps of the first, whose rank has the loss."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = []
    for number, (site, num_ranks) in enumerate(sites.items()):
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(sites)), "--node-rank", str(number)),
            *("--nproc-per-node", str(num_ranks), "--master-addr", "127.0.0.1", "--master-port", str(port)),
            *("-m", "vtp_plugin", "run", "examples/pretrain_gpt.py", "--vtp-size-list", SIZE_LIST),
            *("--vtp-device", "cpu", "--vocab-size", str(num_words), *TRAINING, *flags),
            *(["--vtp-site", site] if site else []),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, env=environment, **pipes))
    with ThreadPoolExecutor() as readers:
        printed = [*readers.map(lambda one: one.communicate()[0], started)]
    if any(one.returncode for one in started):
        sys.exit("\n".join(text[-3000:] for text in printed))
    print(*(line.strip() for line in printed[0].splitlines() if " lm loss: " in line), sep="\n")


if __name__ == "__main__":
    main()
