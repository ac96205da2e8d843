"""Plans of ``search`` beside those of published planners, on the ground of one of them.

    python -m benchmarks.published --sailor PATH

PATH is a reader's own checkout of Sailor's artifact (SOSP'25, github.com/eth-easl/sailor, at cf2c8e3), which is read
and not changed. Its profiles (OPT-350M on A100-40 and V100-16, a step of 1024 samples) are translated into a cluster;
``search`` runs on it with their rule of memory. Two judges say how many samples a second each plan trains: the
simulator of this project, and Sailor's own, imported from the checkout. Plans of others are quoted
(``benchmarks/published_quoted.py``).

In their simulator all messages between stages go from node to node; so here nodes have no quicker links inside. Beside
the samples a second of both judges stands how many more those of ours are, then the seconds of the processor that
planning took. The richer search is one of plans that ``search`` does not look for (``benchmarks/published_richer.py``).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.published_cluster import KINDS, Artifact, ask, read_artifact, read_cluster
from benchmarks.published_ours import samples_per_s
from benchmarks.published_plans import Plan, plan_of, read_plan, show_plan
from benchmarks.published_quoted import CLUSTERS, QUOTED
from benchmarks.published_richer import Richer
from benchmarks.published_theirs import Theirs
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import SearchProblem

# Layouts of ours that their simulator may choose from.
_NUM_BEST = 5
# Plans that are longer are not shown in full.
_MOST_SHOWN = 120


class Row(NamedTuple):
    """A plan and what the judges say of it, in samples a second; None where it does not fit or was not timed."""

    name: str
    plan: Plan
    ours: float | None
    theirs: float | None
    seconds: float


def main() -> None:
    """Search, judge and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sailor", type=Path, required=True, metavar="PATH", help="of a checkout")
    parser.add_argument("--limit-s", type=float, default=600.0, metavar="S", help="seconds of the processor, a search")
    parser.add_argument("--cards", nargs="+", metavar="A+V", help=f"numbers of {' and '.join(KINDS)} cards")
    options = parser.parse_args()
    clusters = [read_cards(text) for text in options.cards] if options.cards else [*CLUSTERS]
    artifact = read_artifact(options.sailor)
    print("| GPUs | plan of | samples/s, our simulator | Sailor's simulator | CPU s | plan |")
    print("|---|---|---|---|---|---|")
    with Theirs.of(options.sailor, artifact) as theirs:
        for counts in clusters:
            cards = "+".join(map(str, counts))
            rows = [*judged(artifact, theirs, counts, options.limit_s)]
            for row in rows:
                print("| " + " | ".join((cards, *_shown(row, rows[0]))) + " |", flush=True)


def read_cards(text: str) -> tuple[int, ...]:
    """Read numbers of cards, one of each kind.

    >>> read_cards("16+48")
    (16, 48)
    """
    return tuple(int(number) for number in text.split("+"))


def judged(artifact: Artifact, theirs: Theirs, counts: Sequence[int], limit_s: float) -> Iterator[Row]:
    """Yield our best plan, and then those beside it."""
    problem = ask(artifact, read_cluster(artifact, counts)).problem
    start = time.process_time()
    found = find_best(problem, num_best=_NUM_BEST, limit_s=limit_s)
    seconds = time.process_time() - start
    name = "ours" if found.is_complete else "ours, not all bounded"
    best = [_row(artifact, theirs, problem, name, plan_of(candidate), seconds) for candidate in found.best]
    yield best[0]
    other = max(best, key=lambda row: row.theirs or 0.0)
    if other is not best[0]:
        yield other._replace(name=f"ours, Sailor's choice of {len(best)}")
    if found.stock is not None:
        stock = _row(artifact, theirs, problem, "stock Megatron, by our search", plan_of(found.stock), seconds)
        # In its own order, which does not send ahead.
        yield stock._replace(ours=artifact.training["global_batch_size"] / found.stock.step_s)
    richer = Richer(artifact, problem)
    start = time.process_time()
    found = find_best(richer.problem, num_best=_NUM_BEST, limit_s=limit_s)
    seconds = time.process_time() - start
    name = "a richer search" if found.is_complete else "a richer search, not all bounded"
    plans = [best[0].plan, *(richer.plan_of(candidate) for candidate in found.best)]
    rows = [_row(artifact, theirs, problem, name, plan, seconds) for plan in plans]
    yield max(rows, key=lambda row: row.ours or 0.0)
    for quoted in QUOTED:
        if quoted.counts == tuple(counts):
            yield _row(artifact, theirs, problem, quoted.planner, read_plan(quoted.plan), quoted.seconds)


def _row(artifact: Artifact, theirs: Theirs, problem: SearchProblem, name: str, plan: Plan, seconds: float) -> Row:
    return Row(
        name,
        plan,
        samples_per_s(artifact, problem, plan),
        theirs.samples_per_s(plan),
        seconds,
    )


def _shown(row: Row, best: Row) -> tuple[str, ...]:
    """Write the cells of a row: its figures, and how much more those of ours are."""

    def figure(own: float | None, of_best: float | None) -> str:
        if own is None:
            return "does not fit"
        more = "" if row is best or of_best is None else f" ({100 * (of_best / own - 1):+.1f} %)"
        return f"{own:.1f}{more}"

    plan = show_plan(row.plan)
    if len(plan) > _MOST_SHOWN:
        lengths = sorted({len(pipeline) for pipeline in row.plan.pipelines})
        stages = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
        plan = f"mbs {row.plan.micro}: {len(row.plan.pipelines)} pipelines of {stages} stages"
    return row.name, figure(row.ours, best.ours), figure(row.theirs, best.theirs), f"{row.seconds:.1f}", plan


if __name__ == "__main__":
    main()
