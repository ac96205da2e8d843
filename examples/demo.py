"""The demo behind ``make demo``: a small GPT on real text, stages of tensor-parallel size 1 and 2, on the CPU.

It trains with ``--vtp-size-list 1,2`` (three processes), saves, resumes, and compares the first steps with the uniform
run ``1,1``. Everything it writes lies under ``out/demo``, where it replaces what it wrote before.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from own_folder import begin
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "demo"
DATA = OUT / "python_sources"
CHECKPOINT = OUT / "checkpoint"
TENSORBOARD = OUT / "tensorboard"

SIZE_LIST = "1,2"
NUM_STEPS = 200
NUM_RESUMED_STEPS = 10
NUM_COMPARED_STEPS = 5
SEQ_LENGTH = 64
GLOBAL_BATCH_SIZE = 32
# A uniform run pads the vocabulary alike if this is a multiple of both stages' sizes.
VOCAB_MULTIPLE = 64

ARGUMENTS = f"""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length {SEQ_LENGTH}
    --max-position-embeddings {SEQ_LENGTH} --micro-batch-size 8 --global-batch-size {GLOBAL_BATCH_SIZE}
    --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --seed 1234
    --optimizer adam --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-decay-iters {NUM_STEPS}
    --lr-warmup-iters 10 --clip-grad 1.0 --weight-decay 0.01
    --tokenizer-type NullTokenizer --vocab-size 256 --null-tokenizer-eod-id 0 --split 98,1,1
    --eval-interval 1000 --eval-iters 2 --log-interval 1 --save-interval {NUM_STEPS} --num-workers 1
    --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
""".split()

_STEP = re.compile(
    r"iteration\s+(?P<step>\d+)/.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*lm loss: (?P<loss>[\d.E+-]+)"
)

_SHOWN = ("padded vocabulary", "validation loss", " error: ")


@dataclass(frozen=True, slots=True)
class Step:
    """One training step."""

    number: int
    loss: float
    time_ms: float


def main() -> None:
    """Run the four parts and print the summary."""
    begin(OUT, Path(__file__).name)
    headline(f"1. Text: Python's standard library as bytes, in Megatron's indexed format -> {OUT.relative_to(ROOT)}")
    call([sys.executable, "examples/make_dataset.py", str(DATA)])

    headline(f"2. Train {NUM_STEPS} steps with --vtp-size-list {SIZE_LIST}: three processes, Megatron's own output")
    begin_s = time.monotonic()
    saving = ["--train-iters", str(NUM_STEPS), "--save", str(CHECKPOINT)]
    steps = train("train", SIZE_LIST, saving, show_every=20)
    train_s = time.monotonic() - begin_s

    headline(f"3. Resume from the checkpoint for {NUM_RESUMED_STEPS} steps")
    last = NUM_STEPS + NUM_RESUMED_STEPS
    loading = ["--load", str(CHECKPOINT), "--train-iters", str(last), "--override-opt-param-scheduler"]
    resumed = train("resume", SIZE_LIST, loading, show_every=5)

    headline(f"4. The uniform run: --vtp-size-list 1,1, same padded vocabulary, first {NUM_COMPARED_STEPS} steps")
    stopping = ["--train-iters", str(NUM_STEPS), "--exit-interval", str(NUM_COMPARED_STEPS)]
    uniform = train("uniform", "1,1", stopping, show_every=1, vocab_multiple=VOCAB_MULTIPLE)

    summarise(steps, resumed, uniform, train_s)


def train(name: str, size_list: str, extra: list[str], *, show_every: int, vocab_multiple: int = 0) -> list[Step]:
    """Run the example script under torchrun; its whole output goes to ``out/demo/NAME.log``.

    Returns:
        The steps, with the exact losses of the TensorBoard log (the text output has seven digits).
    """
    sizes = [int(size) for size in size_list.split(",")]
    # The plugin multiplies by the least common multiple of the stages that hold the vocabulary.
    vocab_multiple = vocab_multiple or VOCAB_MULTIPLE // max(sizes)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(sum(sizes))),
        *("-m", "vtp_plugin", "run", "examples/pretrain_gpt.py", "--vtp-size-list", size_list),
        *("--vtp-device", "cpu", "--data-path", str(DATA), "--data-cache-path", str(OUT / "cache")),
        *("--make-vocab-size-divisible-by", str(vocab_multiple), "--tensorboard-dir", str(TENSORBOARD / name)),
        *(*ARGUMENTS, *extra),
    ]
    steps: list[Step] = []
    log_path = OUT / f"{name}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with (
        log_path.open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        in_layout = False
        for line in process.stdout:
            log.write(line)
            in_layout = line.startswith("stage ") or (in_layout and not line.startswith("padded vocabulary"))
            found = _STEP.search(line)
            if found:
                steps.append(Step(int(found["step"]), float(found["loss"]), float(found["ms"])))
                is_shown = len(steps) == 1 or steps[-1].number % show_every == 0
            else:
                is_shown = in_layout or any(word in line for word in _SHOWN)
            if is_shown:
                print(line, end="", flush=True)
    if process.returncode:
        sys.exit(f"{name} failed with exit code {process.returncode}; see {log_path}")
    exact = exact_losses(TENSORBOARD / name)
    return [Step(step.number, exact[step.number], step.time_ms) for step in steps]


def exact_losses(folder: Path) -> dict[int, float]:
    """Read the losses by step from a TensorBoard log, in full float32 precision."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return {event.step: event.value for event in events.Scalars("lm loss")}


def summarise(steps: list[Step], resumed: list[Step], uniform: list[Step], train_s: float) -> None:
    """Print what a reader wants to take away."""
    headline("Summary")
    num_tokens = len(steps) * GLOBAL_BATCH_SIZE * SEQ_LENGTH
    time_ms = statistics.median(step.time_ms for step in steps)
    print(f"loss              {steps[0].loss:.3f} -> {steps[-1].loss:.3f} nats per byte in {len(steps)} steps")
    print(f"after the resume  {resumed[-1].loss:.3f} at step {resumed[-1].number}")
    print(f"tokens            {num_tokens:,}")
    print(f"time per step     {time_ms:.0f} ms (median); training took {train_s:.0f} s, start-up included")
    print(f"checkpoint        {CHECKPOINT.relative_to(ROOT)}")
    print(f"TensorBoard log   {(TENSORBOARD / 'train').relative_to(ROOT)}")
    print(f"\nstep  loss with {SIZE_LIST}  loss with 1,1  relative difference")
    differences = []
    for ours, theirs in zip(steps[: len(uniform)], uniform, strict=True):
        differences.append(abs(ours.loss - theirs.loss) / theirs.loss)
        print(f"{ours.number:4d}  {ours.loss:13.7f}  {theirs.loss:13.7f}  {differences[-1]:.1e}")
    print(f"largest relative difference: {max(differences):.1e} (float32 resolves 6e-08)")


def headline(text: str) -> None:
    """Print a title."""
    print(f"\n=== {text}", flush=True)


def call(command: list[str]) -> None:
    """Run a command in the project's root; leave with its exit code if it fails."""
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main()
