"""What a checkpoint costs: saving and loading with the plugin over stock Megatron, and loading into another layout.

    python -m benchmarks.checkpoint

A GPT model on two ranks with the distributed optimizer in its default form, ``torch_dist``. In every pair two runs of
``examples/pretrain_gpt.py`` save and load again in turn, the first of which changes from pair to pair:

* stock Megatron with two equal stages;
* the plugin with the same list, forced on: save and load in one layout;
* the plugin, which loads what stock and plugin saved into another layout (one stage of two ranks).

Printed are the bytes of the files, geometric means of the ratios with their 95 % interval, and by how much the largest
rank's memory grows at its peak while it loads, beyond what the loaded state holds. A process starts afresh for every
figure. What was just written is in the file cache: that is the hardest case for what the plugin itself computes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks.checkpoint_rank import run_rank
from benchmarks.step_time import mean_with_interval

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
_MODEL = (
    "--num-layers 2 --seq-length 16 --max-position-embeddings 16 --num-attention-heads 8 --micro-batch-size 1 "
    "--global-batch-size 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 1023 --num-workers 0 "
    "--transformer-impl local --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization "
    "--no-gradient-accumulation-fusion --no-persist-layer-norm --untie-embeddings-and-output-weights "
    "--use-distributed-optimizer --eval-iters 0 --eval-interval 1000 --log-interval 1 --ckpt-format torch_dist"
)
_ENDS = {"save": "--train-iters 1 --save {folder} --save-interval 1", "load": "--train-iters 1 --load {folder}"}
_LISTS = {"stock": "1,1", "plugin": "1,1", "other": "2"}


def main() -> None:
    """Measure and print; under torchrun, be one of the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return run_rank(*sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=2048, help="2048 makes a file of more than 512 MiB a rank")
    options = parser.parse_args()
    figures: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="vtp-checkpoint-", dir=Path.cwd()) as name:
        for number in range(options.pairs):
            for variant in ("stock", "plugin")[:: -1 if number % 2 else 1]:
                folder = Path(name) / variant
                for kind, seconds in _round(variant, folder, options.hidden_size, figures):
                    figures[kind].append(seconds)
                if number == 0:
                    _print_files(variant, folder)
                shutil.rmtree(folder)
    _print(figures)


def _round(
    variant: str, folder: Path, hidden_size: int, figures: defaultdict[str, list[float]]
) -> list[tuple[str, float]]:
    """Save, load in the same layout, and with the plugin in another one."""
    found: list[tuple[str, float]] = []
    for what, how in (("save", variant), ("load", variant), *([("load", "other")] if variant == "plugin" else [])):
        notes = _run(how, what, folder, hidden_size)
        found.append((f"{what} {how}", max(note["seconds"] for note in notes)))
        if what == "load":
            figures[f"memory {how}"].append(max(note["peak_bytes"] - note["kept_bytes"] for note in notes))
    return found


def _run(how: str, what: str, folder: Path, hidden_size: int) -> list[dict[str, float]]:
    """Start the ranks of one run; return what each noted of its one save or load."""
    words = [*_MODEL.split(), "--hidden-size", str(hidden_size), "--ffn-hidden-size", str(4 * hidden_size)]
    words += _ENDS[what].format(folder=folder).split()
    sizes = _LISTS[how].split(",")
    if how == "stock":
        words += ["--pipeline-model-parallel-size", str(len(sizes))]
    else:
        words += ["--vtp-size-list", _LISTS[how], "--vtp-force", "--vtp-device", "cpu"]
    words += ["--make-vocab-size-divisible-by", str(1024 // int(sizes[0]))]
    with tempfile.TemporaryDirectory() as notes:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "benchmarks.checkpoint", how, what, notes, *words]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            sys.exit(f"{how} {what} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return [json.loads(file.read_text()) for file in Path(notes).iterdir()]


def _print_files(variant: str, folder: Path) -> None:
    files = [(file.stat().st_size, file.name) for file in folder.rglob("*") if file.is_file()]
    shown = ", ".join(f"{name} {size / MIB:.0f} MiB" for size, name in sorted(files, reverse=True)[:2])
    print(
        f"{variant}: {sum(size for size, _ in files) / MIB:.1f} MiB in {len(files)} files; largest: {shown}", flush=True
    )


def _print(figures: dict[str, list[float]]) -> None:
    print(f"{'':42} {'median s':>10} {'ratio':>7} {'95 %':>16}")
    for name, over, most in (
        ("save plugin", "save stock", 1.05),
        ("load plugin", "load stock", 1.05),
        ("load other", "load plugin", 1.3),
    ):
        ratios = [a / b for a, b in zip(figures[name], figures[over], strict=True)]
        mean, low, high = mean_with_interval(ratios)
        verdict = "met" if high <= most else f"over {most:g}"
        median_s = statistics.median(figures[name])
        print(f"{name + ' over ' + over:42} {median_s:10.2f} {mean:7.3f} {low:7.3f} to {high:5.3f}  {verdict}")
    for name, values in figures.items():
        if name.startswith("memory"):
            print(f"{name}: {statistics.median(values) / MIB:.0f} MiB at the peak above the loaded state")


if __name__ == "__main__":
    main()
