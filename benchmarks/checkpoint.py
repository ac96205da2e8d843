"""What a checkpoint costs: saving and loading with the plugin over stock Megatron, in another layout, behind a run.

    python -m benchmarks.checkpoint

A GPT model on two ranks with the distributed optimizer in its default form, ``torch_dist``. In every pair runs of
``examples/pretrain_gpt.py`` save, and load again, in an order that turns round from pair to pair:

* stock: stock Megatron with two equal stages, which syncs some of its files;
* synced: the same, and then all files and folders are synced, as the plugin does it; only saved;
* plugin: the plugin with the same list, forced on, with hashes and syncs; its checkpoint is also loaded into another
  layout (other: one stage of two ranks), written again by ``checkpoint reshard``, and copied by ``cp``, with a sync;
* background: the plugin saves with ``--async-save``; counted is what a step waits: until Megatron's function returns,
  and in the later step that finds all written, and moves the tracker.

Printed are the bytes of the files, geometric means of the ratios with their 95 % interval, and by how much the largest
process's memory grows at its peak: while a rank loads, beyond what the loaded state holds; of ``reshard``, beyond its
imports and without pages of files. A process starts afresh for every figure. Loads are measured twice: from the disk,
with the files dropped from the file cache; and warm, from that cache, where a load waits for nothing and so shows most
of what the plugin itself computes. A load into another layout reads more bytes; its ratio is for as many.
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
from benchmarks.checkpoint_reshard import copy_and_sync
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
_COLD, _WARM = "load {}", "warm load {}"
_LISTS = {"stock": "1,1", "synced": "1,1", "plugin": "1,1", "background": "1,1", "other": "2"}
_ROUNDS = {
    "stock": (("save", "stock"), ("load", "stock")),
    "synced": (("save", "synced"),),
    "plugin": (("save", "plugin"), ("load", "plugin"), ("load", "other")),
    "background": (("save", "background"),),
}
_BACKGROUND = "--async-save --use-persistent-ckpt-worker --async-strategy mcore"


def main() -> None:
    """Measure and print; under torchrun, be one of the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return run_rank(*sys.argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--hidden-size", type=int, default=2048, help="2048 makes a file of more than 512 MiB a rank")
    parser.add_argument("--short", action="store_true", help="leave out the other layout, reshard and cp")
    options = parser.parse_args()
    figures: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="vtp-checkpoint-", dir=Path.cwd()) as name:
        for number in range(options.pairs):
            for variant in [*_ROUNDS][:: -1 if number % 2 else 1]:
                folder = Path(name) / variant
                for what, how in _ROUNDS[variant]:
                    if options.short and how == "other":
                        continue
                    if what == "save":
                        notes = _run(how, what, folder, options.hidden_size)
                        figures[f"save {how}"].append(max(note["seconds"] for note in notes))
                        continue
                    _forget(folder)
                    for label in (_COLD, _WARM):
                        _note_load(label.format(how), _run(how, what, folder, options.hidden_size), figures)
                if variant == "plugin" and not options.short:
                    _reshard(folder, figures)
                if number == 0:
                    _print_files(variant, folder)
                shutil.rmtree(folder)
    _print(figures)


def _forget(folder: Path) -> None:
    """Let the system forget what it has of the files, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())  # what is not written yet is not forgotten
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _note_load(name: str, notes: list[dict[str, float]], figures: defaultdict[str, list[float]]) -> None:
    seconds = max(note["seconds"] for note in notes)
    figures[name].append(seconds)
    figures[f"{name}, a byte"].append(seconds / max(note["read_bytes"] for note in notes))
    figures[f"memory {name}"].append(max(note["peak_bytes"] - note["kept_bytes"] for note in notes))


def _reshard(folder: Path, figures: defaultdict[str, list[float]]) -> None:
    """Write a checkpoint again, and copy it; what goes first does not matter, since all of it was just read."""
    resharded, copied = (folder.with_name(f"{folder.name}-{what}") for what in ("resharded", "copied"))
    own = "from benchmarks.checkpoint_reshard import main; main()"
    command = [sys.executable, "-c", own, str(folder), str(resharded)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"reshard ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    note = json.loads(done.stdout.splitlines()[-1])
    figures["reshard"].append(note["seconds"])
    figures["memory reshard"].append(note["peak_bytes"])
    figures["cp"].append(copy_and_sync(folder, copied))
    for each in (resharded, copied):
        shutil.rmtree(each)


def _run(how: str, what: str, folder: Path, hidden_size: int) -> list[dict[str, float]]:
    """Start the ranks of one run; return what each noted of its one save or load."""
    words = [*_MODEL.split(), "--hidden-size", str(hidden_size), "--ffn-hidden-size", str(4 * hidden_size)]
    words += _ENDS[what].format(folder=folder).split()
    sizes = _LISTS[how].split(",")
    if how in ("stock", "synced"):
        words += ["--pipeline-model-parallel-size", str(len(sizes))]
    else:
        words += ["--vtp-size-list", _LISTS[how], "--vtp-force", "--vtp-device", "cpu"]
        words += _BACKGROUND.split() if how == "background" else []
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


def _print(figures: defaultdict[str, list[float]]) -> None:
    print(f"{'':46} {'median s':>10} {'ratio':>7} {'95 %':>16}")
    for name, over, most in (
        ("save plugin", "save stock", None),
        ("save plugin", "save synced", 1.05),
        ("load plugin", "load stock", 1.05),
        ("warm load plugin", "warm load stock", None),
        ("load other", "load plugin", None),
        ("load other, a byte", "load plugin, a byte", 1.3),
        ("warm load other, a byte", "warm load plugin, a byte", None),
        ("save background", "save plugin", None),
        ("reshard", "cp", 2.0),
    ):
        if not figures[name]:
            continue
        ratios = [a / b for a, b in zip(figures[name], figures[over], strict=True)]
        mean, low, high = mean_with_interval(ratios)
        verdict = "" if most is None else "met" if high <= most else f"over {most:g}"
        median = f"{statistics.median(figures[name]):10.2f}" if "byte" not in name else " " * 10
        print(f"{name + ' over ' + over:46} {median} {mean:7.3f} {low:7.3f} to {high:5.3f}  {verdict}")
    for name, values in figures.items():
        if name.startswith("memory"):
            beyond = "what is loaded" if "load" in name else "its imports"
            print(f"{name}: {statistics.median(values) / MIB:.0f} MiB at the peak beyond {beyond}")


if __name__ == "__main__":
    main()
