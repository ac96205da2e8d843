"""What ``profile`` says of one card beside real steps: of one rank, and of two less what their collectives take.

    python -m benchmarks.profiled --rounds 5

A small GPT is profiled and trained by turns, by megatron.training under the plugin. What a step should take is
what the parts take, times microbatches, and the optimizer. The two ranks of a real run share this machine's caches and
memory, which cards do not; so for two ranks two profiles also run at once. As a control, two runs of one rank each that
know nothing of each other train at once: by how much their steps are longer than those of one alone is what two busy
cores cost. Printed are medians over the rounds, and their range.

    python -m benchmarks.profiled --device cuda --hidden-size 2048

On an accelerator it is one rank alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from benchmarks.emulated import ROOT, Seat, run_ranks
from benchmarks.reality import TRAINING, read_asked
from vtp_plugin.tune.search.evaluate import evaluate
from vtp_plugin.tune.search.problem import SearchSpace, StageType

NUM_LAYERS, NUM_MICROBATCHES = 4, 8
NUM_WARM, NUM_STEPS = 2, 6
# Messages cost nothing here, as in the profile.
CLUSTER = """
[cards.here]
profile = "profile.toml"
[[nodes]]
cards = "here"
cards_per_node = {tp}
[links.inside]
latency_us = 0
gbyte_per_s = 1e9
"""
MODEL = f"""
    --num-layers {NUM_LAYERS} --hidden-size SIZE --num-attention-heads 8 --seq-length SIZE
    --max-position-embeddings SIZE --micro-batch-size 1 --global-batch-size {NUM_MICROBATCHES}
    --vocab-size 1023 --make-vocab-size-divisible-by 8
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0
    --no-gradient-accumulation-fusion --no-persist-layer-norm
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256, help="of the model; as many tokens are in a sample")
    parser.add_argument("--device", choices=("cpu", "cuda", "npu"), default="cpu")
    options = parser.parse_args()
    model = [*MODEL.replace("SIZE", str(options.hidden_size)).split(), "--vtp-device", options.device]
    # One card; two beside each other, as the two ranks of a real run are.
    rows = {(1, 1): "one rank", (2, 1): "two ranks, profile alone", (2, 2): "two ranks, two profiles at once"}
    if options.device == "cpu":
        model.append("--use-cpu-initialization")
    else:
        rows = {(1, 1): rows[1, 1]}
    ratios: dict[tuple[int, int], list[float]] = {row: [] for row in rows}
    crowded: list[float] = []
    with tempfile.TemporaryDirectory(prefix="vtp-profiled-") as name:
        folder = Path(name)
        for _ in range(options.rounds):
            real_s = {tp: _real_s(tp, model, folder) for tp in {tp for tp, _ in rows}}
            for (tp, number), found in ratios.items():
                predicted_s = _at_once(number, _predicted_s, tp, model, folder)
                found.append(predicted_s / real_s[tp])
                print(f"tp {tp}: profile {1e3 * predicted_s:7.1f} ms, step {1e3 * real_s[tp]:7.1f} ms", flush=True)
            if len(rows) > 1:
                crowded.append(_at_once(2, _real_s, 1, model, folder) / real_s[1])
    for row, found in ratios.items():
        spread = f"{min(found):.3f} to {max(found):.3f}"
        print(f"{rows[row]}: {statistics.median(found):.3f} of a step less collectives ({spread}, {len(found)} rounds)")
    if crowded:
        print(f"two at once / one alone {statistics.median(crowded):.3f} ({min(crowded):.3f} to {max(crowded):.3f})")


def _at_once(number: int, measure: Callable[..., float], tp: int, model: Sequence[str], folder: Path) -> float:
    """Measure in so many processes at once that know nothing of each other; return the mean."""
    own = [folder / str(index) for index in range(number)]
    with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as processes:
        return statistics.mean(processes.map(measure, *zip(*((tp, model, each) for each in own), strict=True)))


def _predicted_s(tp: int, model: Sequence[str], folder: Path) -> float:
    folder.mkdir(exist_ok=True)
    path = folder / "profile.toml"
    words = ["profile", *model, "--out", str(path), "--tp-sizes", str(tp), "--rounds", "20"]
    run_ranks([Seat(wait_s=0.0)], words, None, folder / "profile")
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER.format(tp=tp))
    problem = read_asked(model, cluster).problem
    (split,) = [split for split in problem.splits if split.num_replicas == 1]
    kind = StageType((0,), tp)
    candidate = evaluate(SearchSpace.of(problem, split), [kind], [NUM_LAYERS])
    assert candidate is not None
    return candidate.step_s


def _real_s(tp: int, model: Sequence[str], folder: Path) -> float:
    folder.mkdir(exist_ok=True)
    number = str(NUM_WARM + NUM_STEPS + 1)
    words = [*model, *TRAINING.split(), "--train-iters", number, "--vtp-size-list", str(tp)]
    command = ["run", str(ROOT / "examples" / "pretrain_gpt.py"), *words]
    marks = run_ranks([Seat(wait_s=0.0)] * tp, command, None, folder / "run")
    steps = [end - begin - (after - before) for (begin, before), (end, after) in pairwise(marks)]
    return statistics.median(steps[NUM_WARM:])


if __name__ == "__main__":
    main()
