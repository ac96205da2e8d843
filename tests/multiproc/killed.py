"""Runs that are killed while they save: one trial of them, and the campaign.

    python -m tests.multiproc.killed --trials 100 --seed 1

prints a table of the points at which ranks were killed, and every trial after which a checkpoint was not as it must be.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.hosts import background_flags, host_name
from tests.multiproc.kill_hooks import OF_INDEX, OF_PIECES, ORDER, SHARED
from tests.multiproc.script_cases import JOB, ScriptRun, arguments, losses, succeeded
from tests.pool import Pool
from vtp_plugin.checkpoint.contents import Contents
from vtp_plugin.checkpoint.files import TRACKER
from vtp_plugin.checkpoint.newest import problem_of
from vtp_plugin.offline.compare import Comparison

FORMATS: dict[str, tuple[str, ...]] = {
    "torch_dist": (),
    "torch_dist, distributed optimizer": ("--use-distributed-optimizer",),
    "torch": ("--ckpt-format", "torch"),
    "background": background_flags(),
}
SIZES, NUM_RANKS, NUM_STEPS = "1,2", 3, 4


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        form: a key of :data:`FORMATS`.
        point: where it is killed, or a control.
        save: in which save, from 1 on.
        rank: that is killed; None for whoever comes to the point.
    """

    form: str
    point: str
    save: int = 2
    rank: int | None = None

    @property
    def is_published(self) -> bool:
        """Whether the tracker names the checkpoint by then."""
        return self.point in ("after tracker", "clean-up")


def points_of(form: str) -> tuple[str, ...]:
    """Give the points that a save comes to."""
    return (*OF_PIECES, *(() if form == "torch" else OF_INDEX), *SHARED)


def train(
    pool: Pool, folder: Path, form: str, extra: Sequence[str] = (), trial: Trial | None = None, *, act: str = ""
) -> list[ScriptRun]:
    """Train four steps, and save after each."""
    words = [*FORMATS[form], "--save", str(folder), "--save-interval", "1", *extra]
    order = {} if trial is None else {"point": trial.point, "save": trial.save, "rank": trial.rank}
    order["act"] = act
    order["log"] = str(folder.with_suffix(".log"))
    kwargs: dict[str, Any] = {"arguments": arguments(SIZES, extra=words), "timeout_s": 120.0}
    if trial is not None:
        kwargs["hooks"] = ["kill_in_save"]
    return pool.run(NUM_RANKS, JOB, kwargs, timeout_s=150.0, env={ORDER: json.dumps(order)})


def run_trial(pool: Pool, folder: Path, trial: Trial, reference: Path) -> Iterator[str]:
    """Kill a run, and say what is wrong with what it leaves: nothing, if all is well."""
    keep = ["--vtp-keep-checkpoints", "1"] if trial.point == "clean-up" else []
    train(pool, folder, trial.form, keep, trial)
    log = folder.with_suffix(".log")
    struck = log.read_text().splitlines() if log.exists() else []
    if len(struck) != 1:
        yield f"was struck {len(struck)} times: {struck}"
    yield from judge(folder, trial, reference)


def judge(folder: Path, trial: Trial, reference: Path) -> Iterator[str]:
    """Look at a folder of checkpoints from outside, without a word of the run's."""
    tracker = folder / TRACKER
    text = tracker.read_text() if tracker.exists() else "0"
    least = trial.save if trial.is_published else trial.save - 1
    if trial.form == "background":
        # What was saved before may still have been on its way.
        if not (text.isdecimal() and int(text) <= trial.save):
            yield f"the tracker says {text!r}"
    elif text != str(least):
        yield f"the tracker says {text!r}, not {least}"
    for checkpoint in sorted(folder.glob("iter_*")):
        if (problem := problem_of(checkpoint)) is not None:
            yield problem
        elif not is_same(checkpoint, reference / checkpoint.name):
            yield f"{checkpoint} is another state than that of the run that was not killed"
    if text.isdecimal() and int(text) and not (folder / f"iter_{int(text):07d}").is_dir():
        yield f"the tracker says {text}, which is not there"


def is_same(one: Path, other: Path) -> bool:
    """Tell whether two checkpoints hold the same weights and states of the optimizer, to the last bit."""
    files = sorted(one.glob("mp_rank_*/*.pt"))
    if not files:
        a, b = Contents(one), Contents(other)
        return all(each.is_equal for each in Comparison(a, b, is_weights_only=False)) and a.steps() == b.steps()
    return all(_equal(_load(file), _load(other / file.relative_to(one))) for file in files)


def _load(file: Path) -> Any:
    state = torch.load(file, map_location="cpu", weights_only=False)
    return {key: value for key, value in state.items() if key.startswith("model") or key == "optimizer"}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def resume(pool: Pool, folder: Path, trial: Trial, whole: Sequence[float]) -> Iterator[str]:
    """Go on with what a killed run has left, and compare the losses with those of one that was not killed."""
    step = int((folder / TRACKER).read_text())
    if step == NUM_STEPS:
        yield "it was not killed"
        return
    runs = succeeded(train(pool, folder, trial.form, ["--load", str(folder)]))
    if losses(runs) != list(whole[step:]):
        yield f"goes on from step {step} with {losses(runs)}, not {whole[step:]}"
    left = [path.name for path in folder.iterdir() if path.name.startswith("partial_")]
    if left:
        yield f"what was left is still there: {left}"


def make_trials(count: int, seed: int) -> Iterator[Trial]:
    """Give so many trials: every point of every format in turn, at saves and on ranks that are drawn."""
    draw = random.Random(seed)
    forms = [form for form in FORMATS if form != "background" or host_name() in ("0.12", "0.19")]
    if host_name() == "0.12":
        forms.remove("torch_dist, distributed optimizer")
    every = [(form, point) for form in forms for point in points_of(form)]
    draw.shuffle(every)
    for number in range(count):
        form, point = every[number % len(every)]
        # A clean-up needs one before.
        save = draw.randint(2 if point == "clean-up" else 1, 3)
        yield Trial(form, point, save, draw.randrange(NUM_RANKS) if point in OF_PIECES else None)


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resumed", type=int, default=4, help="go on with every so many trials; default 4")
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="vtp-killed-") as name, Pool(max_workers=NUM_RANKS) as pool:
        whole: dict[str, list[float]] = {}
        for number, trial in enumerate(make_trials(options.trials, options.seed)):
            reference = Path(name) / f"reference-{trial.form}"
            if trial.form not in whole:
                whole[trial.form] = losses(succeeded(train(pool, reference, trial.form)))
            folder = Path(name) / "trial"
            problems = [*run_trial(pool, folder, trial, reference)]
            if number % options.resumed == 0 and (folder / TRACKER).exists():
                problems += resume(pool, folder, trial, whole[trial.form])
                counts[trial.form, "resumed"] += 1
            bad += [f"{trial}: {problem}" for problem in problems]
            counts[trial.form, trial.point] += not problems
            print(number, trial, problems or "well", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.with_suffix(".log").unlink(missing_ok=True)
    _print_table(counts)
    print("\n".join(bad) or "all is well")
    sys.exit(1 if bad else 0)


def _print_table(counts: Counter[tuple[str, str]]) -> None:
    forms = [form for form in FORMATS if any(each == form for each, _ in counts)]
    print(f"| killed | {' | '.join(forms)} |\n|---|{'---|' * len(forms)}")
    for point in (*OF_PIECES, *OF_INDEX, *SHARED, "resumed"):
        print(f"| {point} | {' | '.join(str(counts[form, point] or '-') for form in forms)} |")


if __name__ == "__main__":
    main()
