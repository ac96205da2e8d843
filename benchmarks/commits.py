"""Whether a change made anything slower: the benchmarks of two commits in turn, pair after pair.

    python -m benchmarks.commits 622bd81                    # the working tree against that commit, ten pairs
    python -m benchmarks.commits 622bd81 --only step --pairs 20

Every benchmark runs in a copy of its own commit, with this interpreter. Of each figure the ratio (this tree over the
commit) is taken pair by pair, which run goes first changes from pair to pair, and printed are the geometric mean of the
ratios with its 95 % interval. Where processes differ from start to start by more than is looked for, the two of a pair
are alive at once and measure in turn (see ``turns.py``), with this tree's scripts. What ``--most`` asks for (1.03) is
met if the upper bound is below; on a machine that is not quiet the interval gets wide, and says so.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.step_time import mean_with_interval
from benchmarks.turns import environment_of, in_turn

ROOT = Path(__file__).resolve().parent.parent


class Measure(NamedTuple):
    """A benchmark, and which of its figures count.

    Attributes:
        words: command-line arguments that start it.
        figure: matches a printed line; its groups are the name of the figure and the figure.
        num_turns: number of turns of each program of a pair; 0 if one runs after the other.
    """

    words: tuple[str, ...]
    figure: str = ""
    num_turns: int = 0


_STEP = ("step_time", "--steps", "3")
_SCRIPTS = "boundary*.py", "microbatch.py", "ranks.py", "startup_world.py", "step_time.py", "turns.py"
"""What measures in turn; how the product is asked (``exchanges.py``) is each tree's own."""
MEASURES: Mapping[str, Measure] = {
    "step": Measure((*_STEP, "--variant", "plugin"), num_turns=16),
    "rank0": Measure((*_STEP, "--variant", "plugin, rank0"), num_turns=16),
    "moe": Measure((*_STEP, "--model", "moe", "--variant", "plugin"), num_turns=16),
    "microbatch": Measure(("microbatch", "--variant", "plugin 1,1"), num_turns=16),
    "microbatch 1 -> 2": Measure(("microbatch", "--variant", "plugin 1,2, sliced"), num_turns=16),
    "apply": Measure(("apply_time", "--repeat", "1"), r"^(apply\(\)).*; CPU ([\d.]+) s"),
    "planning": Measure(
        ("startup", "--planned-sizes", "4096", "--world-sizes", "512"), r"^( *\d+ \S.*?) {2,}\d+ +([\d.]+) +[\d.]+$"
    ),
    "start-up": Measure(("startup_world",), num_turns=5),
    "boundary 1 -> 4": Measure(("boundary", "--sizes", "1,4"), num_turns=60),
    "boundary 2 -> 3": Measure(("boundary", "--sizes", "2,3"), num_turns=60),
    "bridge": Measure(("bridge", "--quick"), r"^\| (.+? \| [\d.]+) \| [\d.]+ \| \S+ \| (\d+) "),
    "colocated": Measure(("bridge", "--colocated", "--quick"), r"^\| ([\d.]+) \| [\d.]+ \| ([\d.]+) "),
}


def figures(measure: Measure, text: str) -> dict[str, float]:
    """Read the figures that a benchmark printed, by the heading before them and their name; of several the median.

    >>> figures(Measure((), r"^(.+ MiB) +([0-9.]+)"), "2 -> 3, ms\\n1 MiB  2.5\\n1 MiB  3.5\\n4 MiB  9.0")
    {'2 -> 3, ms: 1 MiB': 3.0, '2 -> 3, ms: 4 MiB': 9.0}
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    heading = ""
    for line in text.splitlines():
        if match := re.match(measure.figure, line):
            name = " ".join(match[1].split())
            found[f"{heading}: {name}" if heading else name].append(float(match[2]))
        elif " -> " in line and "ms" in line:
            heading = line.partition(" (")[0]
    return {name: statistics.median(values) for name, values in found.items()}


def ratios(pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, list[float]]:
    """Give the ratios, new over old, of every figure that both have, pair by pair.

    >>> ratios([({"a": 2.0}, {"a": 3.0, "b": 1.0})])
    {'a': [1.5]}
    """
    shared = [name for name in pairs[0][0] if all(name in old and name in new for old, new in pairs)]
    return {name: [new[name] / old[name] for old, new in pairs] for name in shared}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what this tree is compared with")
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--most", type=float, default=1.03, help="what the upper bound of a ratio may be")
    options = parser.parse_args()
    with _checked_out(options.commit) as old:
        for name in options.only:
            pairs = [_pair(MEASURES[name], old, number) for number in range(options.pairs)]
            _print(name, pairs, options.most)


def _pair(measure: Measure, old: Path, number: int) -> tuple[dict[str, float], dict[str, float]]:
    if measure.num_turns:
        name, *words = measure.words
        command = [sys.executable, "-m", f"benchmarks.{name}", *words]
        before, after = in_turn([(old, command), (ROOT, command)], measure.num_turns)
        return dict(before), dict(after)
    order = (old, ROOT) if number % 2 else (ROOT, old)
    found = {tree: figures(measure, _run(measure, tree)) for tree in order}
    return found[old], found[ROOT]


def _run(measure: Measure, tree: Path) -> str:
    name, *words = measure.words
    command = [sys.executable, "-m", f"benchmarks.{name}", *words]
    done = subprocess.run(
        command, cwd=tree, env=environment_of(tree), capture_output=True, text=True, timeout=1800, check=False
    )
    if done.returncode:
        sys.exit(f"benchmarks.{name} in {tree} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    """Give a folder with the files of a commit, and this tree's scripts over it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        for pattern in _SCRIPTS:
            for script in (ROOT / "benchmarks").glob(pattern):
                shutil.copy(script, f"{folder}/benchmarks")
        yield Path(folder)


def _print(name: str, pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]], most: float) -> None:
    found = ratios(pairs)
    if not found:
        print(f"{name}: no figure that both have")
    for figure, values in found.items():
        mean, low, high = mean_with_interval(values)
        verdict = "met" if high <= most else f"over {most:g}" if math.isfinite(high) else "one pair says nothing"
        before = statistics.median(old[figure] for old, _ in pairs)
        print(f"{name:9} {figure:45} {before:10.2f} {mean:7.3f} {low:7.3f} to {high:5.3f}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
