"""The campaign: runs that are killed while they save, and that go on with what was left, until they are killed again.

    python -m tests.multiproc.faults.kill_campaign --trials 100 --seed 1 --results /tmp/killed.jsonl

Every trial is a run that loads what the trial before of its format has left, and is killed at a point of one of its
next two saves; so each checks what it leaves, bit by bit, and that the one before left something to go on with. The
same command goes on where it was stopped. It prints a table of the points, and every trial after which something was
not as it must be; ``--table`` prints only that, of one or several hosts.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tests.multiproc.cases.script_cases import succeeded
from tests.multiproc.faults.kill_trial import FORMATS, NUM_RANKS, OF_WORKERS, Trial, found, points_of, run_trial, train
from tests.multiproc.hooks.kill_hooks import CLEARING, OF_CLAIMS, OF_INDEX, OF_PIECES, REPLACED, SHARED
from tests.support.hosts import exact_resume_tolerance, host_name, reason_to_skip, use_tree
from tests.support.pool import Pool
from vtp_plugin.checkpoint.format.resolver import TRACKER

NUM_STEPS = 12
_STEPS = ("--train-iters", str(NUM_STEPS))


@dataclass(frozen=True, slots=True)
class Drawn:
    """A trial before it is known from which iteration it goes on.

    Attributes:
        number: of the trial.
        trial: its form, point and ranks; ``save`` is how many saves it makes.
        is_searched: whether the run looks for the newest checkpoint that is whole, whatever the tracker says.
    """

    number: int
    trial: Trial
    is_searched: bool


def draw(count: int, seed: int) -> Iterator[Drawn]:
    """Give so many trials: every point of every format in turn, at saves and on ranks that are drawn."""
    forms = [form for form in FORMATS if form != "background" or not reason_to_skip("worker_on_cpus", host_name())]
    every = [(form, point) for form in forms for point in points_of(form)]
    random.Random(seed).shuffle(every)
    for number in range(count):
        form, point = every[number % len(every)]
        dice = random.Random(f"{seed} {number}")
        rank = dice.randrange(NUM_RANKS) if point in (*OF_PIECES, OF_WORKERS) else None
        victim = dice.choice((None, None, 1, 2)) if point in (*SHARED, *OF_INDEX) else None
        # What was left goes at the first save.
        trial = Trial(form, point, 1 if point == CLEARING else dice.randint(1, 2), rank, victim)
        if point == OF_WORKERS:
            trial = replace(trial, point="half a shard", victim=rank)
        yield Drawn(number, trial, is_searched=dice.random() < 0.25)


class Campaign:
    """Runs trials.

    Args:
        pool: for three ranks.
        folder: for all that runs write.
    """

    def __init__(self, pool: Pool, folder: Path) -> None:
        self._pool, self._folder = pool, folder

    def run(self, drawn: Drawn) -> dict[str, Any]:
        """Run one, and say what is to be known of it."""
        form = drawn.trial.form
        reference, folder = (self._folder / f"{what} {form}" for what in ("reference", "trial"))
        if not reference.exists():
            succeeded(train(self._pool, reference, form, _STEPS))
        begin_s = time.monotonic()
        start, is_lost = found(folder)
        if start + 2 >= (5 if exact_resume_tolerance() else NUM_STEPS):
            shutil.rmtree(folder)
            start, is_lost = 0, False
        folder.mkdir(exist_ok=True)
        if drawn.trial.point in ("clean-up", REPLACED) and (is_lost or not start):
            start, is_lost = 1, False  # something must be there that goes
            shutil.copytree(reference / f"iter_{1:07d}", folder / f"iter_{1:07d}", dirs_exist_ok=True)
            (folder / TRACKER).write_text("1")
        trial = replace(drawn.trial, start=start, save=start + drawn.trial.save, is_lost=is_lost)
        words = [*_STEPS, "--load", str(folder)]
        words += ["--vtp-load-newest-valid"] if is_lost or (drawn.is_searched and start) else []
        problems = [*run_trial(self._pool, folder, trial, reference, words)]
        if problems:  # what is wrong here is not to be found again by the next one
            folder.rename(self._folder / f"failed {drawn.number}")
        seconds = round(time.monotonic() - begin_s, 1)
        return {"number": drawn.number, **asdict(trial), "problems": problems, "seconds": seconds}


def main() -> None:
    """Run the campaign, or go on with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, required=True, help="file with a line for every trial")
    parser.add_argument("--only", type=int, help="run this trial again, and note nothing")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    use_tree()
    known = {"host": host_name(), "seed": options.seed}
    done = {line["number"] for line in _read(options.results) if line | known == line}
    wanted = [] if options.table else [each for each in draw(options.trials, options.seed) if each.number not in done]
    wanted = wanted if options.only is None else [[*draw(options.only + 1, options.seed)][-1]]
    with tempfile.TemporaryDirectory(prefix="vtp-killed-") as name, Pool(max_workers=NUM_RANKS) as pool:
        campaign = Campaign(pool, Path(name))
        for each in wanted:
            line = json.dumps({**known, **campaign.run(each)})
            print(line, flush=True)
            if options.only is None:
                with options.results.open("a") as file:
                    file.write(f"{line}\n")
    lines = _read(options.results)
    _print_table(lines)
    sys.exit(1 if any(line["problems"] for line in lines) else 0)


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _print_table(lines: Sequence[dict[str, Any]]) -> None:
    """Print how many trials were well, and of how many where some were not."""
    columns = sorted(
        {(line["host"], line["form"]) for line in lines}, key=lambda each: (each[0], [*FORMATS].index(each[1]))
    )
    print(f"| killed | {' | '.join(f'{host}: {form}' for host, form in columns)} |\n|---|{'---|' * len(columns)}")
    for point in (CLEARING, *OF_PIECES, OF_WORKERS, *OF_CLAIMS, *OF_INDEX, *SHARED, REPLACED, None):
        cells = (
            [line for line in lines if (line["host"], line["form"]) == column and point in (_point(line), None)]
            for column in columns
        )
        print(f"| {point or 'all'} | {' | '.join(map(_cell, cells))} |")
    for line in lines:
        for problem in line["problems"]:
            print(f"{line['host']}, seed {line['seed']}, trial {line['number']}: {problem}")


def _point(line: dict[str, Any]) -> str:
    is_by_worker = line["form"] == "background" and line["point"] in OF_PIECES and line["victim"] is not None
    return OF_WORKERS if is_by_worker else line["point"]


def _cell(lines: Sequence[dict[str, Any]]) -> str:
    num_well = sum(not line["problems"] for line in lines)
    if not lines:
        return "-"
    return str(num_well) if num_well == len(lines) else f"{num_well} of {len(lines)}"


if __name__ == "__main__":
    main()
