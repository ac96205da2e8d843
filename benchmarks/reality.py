"""Predicted beside measured: clusters of emulated cards, what ``search`` says of them, and what their steps take.

    python -m benchmarks.reality --out FOLDER                 all clusters, best layout and those of stock, five steps
    python -m benchmarks.reality --out FOLDER --others 20 --rounds 3 --steps 2     and 20 other layouts of each

Every kind of card is profiled alone by ``profile``, the links by ``profile --links`` on all ranks. These files are
hashed; then ``search`` reads them, and nothing else, and its layouts train by megatron.training under the plugin,
over gloo. Layers are real and small; each also waits (``benchmarks/emulated.py``), by kind of card. Two sites are
joined by an emulated line (``benchmarks/wan``), which needs root. Results are added to FOLDER/results.jsonl; what
stands there is not run again, and ``--table`` prints it as ``docs/evidence/predictions.md`` has it. ``--swapped``, a
control: two kinds of cards change places behind the prediction's back.

Of the other layouts one half is drawn at random; the other half are the shortest, as predicted, of 400 random ones.
Each runs once; further rounds are for those that took less than 1.1 of the best one's step.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from benchmarks.emulated import ROOT, Seat, run_ranks
from benchmarks.wan.link import LinkUnavailableError, Site, WanLink
from vtp_plugin.cli import search
from vtp_plugin.cli.command_base import Parser
from vtp_plugin.cli.search_request import SearchRequest, read_request
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.tune.cluster.read_cluster import read_cluster
from vtp_plugin.tune.search.evaluate import Candidate, evaluate
from vtp_plugin.tune.search.find_best import find_best
from vtp_plugin.tune.search.problem import SearchSpace, StageType

# Seconds that a layer's forward pass waits, for one sample.
KINDS = {"new": 0.060, "half": 0.120, "quarter": 0.240, "eighth": 0.480}
MODEL = """
    --hidden-size 48 --num-attention-heads 12 --seq-length 48 --max-position-embeddings 48
    --micro-batch-size 1 --global-batch-size 8 --vocab-size 127 --make-vocab-size-divisible-by 4
    --transformer-impl local --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-persist-layer-norm --vtp-device cpu
"""
TRAINING = """
    --lr 1e-3 --min-lr 1e-4 --log-interval 1000 --eval-interval 1000 --eval-iters 0 --mock-data --num-workers 0
    --tokenizer-type NullTokenizer
"""
NUM_WARM = 1
# Other layouts: how many random ones the shortest are taken of; what takes longer than so many steps of the best one is
# not run again.
NUM_DRAWN, NEAR = 400, 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedCluster:
    """A cluster and a model.

    Attributes:
        name: name for people.
        nodes: kind of cards, number of cards and site of every node.
        num_layers: number of layers of the model.
        line: latency in ms and rate in Mbit/s between the sites; None where there is one site.
    """

    name: str
    nodes: tuple[tuple[str, int, Site | None], ...]
    num_layers: int
    line: tuple[float, float] | None = None


# A grid like that of ``benchmarks/when.py`` with half as many cards in a node, and one or two nodes of each kind.
NODES = {
    "4": ((4,), (4,)),
    "3": ((3,), (3,)),
    "2": ((2,), (2,)),
    "new 4, old 2": ((4,), (2,)),
    "new 3, old 4": ((3,), (4,)),
    "mixed": ((3, 1), (2, 1)),
}
SLOWER = {"1x": "new", "2x": "half", "4x": "quarter", "8x": "eighth"}
LINES = {"one site": None, "two sites": (10.0, 1000.0)}
LAYERS = (8, 9)
_NUM_CASES, _SEED = 12, 50


def cases() -> tuple[EmulatedCluster, ...]:
    """Draw clusters from the grid, before anything is known of them."""
    grid = [*itertools.product(NODES, SLOWER, LINES, LAYERS)]
    return tuple(_case(*one) for one in random.Random(_SEED).sample(grid, _NUM_CASES))


def _case(nodes: str, slower: str, line: str, num_layers: int) -> EmulatedCluster:
    sites: tuple[Site | None, Site | None] = (None, None) if LINES[line] is None else ("cloud", "edge")
    return EmulatedCluster(
        name=f"{nodes}; old {slower} slower; {line}; {num_layers} layers",
        nodes=tuple(
            (kind, number, site)
            for kind, each, site in zip(("new", SLOWER[slower]), NODES[nodes], sites, strict=True)
            for number in each
        ),
        num_layers=num_layers,
        line=LINES[line],
    )


CASES = cases()


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of profiles, logs and results")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of clusters, from 1 on")
    parser.add_argument("--others", type=int, default=0, help="other layouts to run besides")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every layout, taking turns")
    parser.add_argument("--steps", type=int, default=5, help="steps of every run that count")
    parser.add_argument("--swapped", action="store_true", help="the control: predictions must miss")
    parser.add_argument("--table", action="store_true", help="run nothing")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / ("swapped.jsonl" if options.swapped else "results.jsonl"))
    if not options.table:
        for number in options.only or range(1, len(CASES) + 1):
            _run_case(number, options, results)
    print("\n".join(_table(results)))


class Results:
    """What was measured, a line for each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = [json.loads(line) for line in path.read_text().splitlines()]

    def add(self, row: dict[str, Any]) -> None:
        """Keep a run."""
        self.rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def of(self, number: int) -> dict[str, list[dict[str, Any]]]:
        """Give the runs of a cluster, by layout."""
        found: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["case"] == number:
                found.setdefault(row["layout"], []).append(row)
        return found


def _run_case(number: int, options: argparse.Namespace, results: Results) -> None:
    case, folder = CASES[number - 1], options.out / f"{number:02}"
    folder.mkdir(exist_ok=True)
    try:
        link = nullcontext() if case.line is None else WanLink(*case.line)
        with link as line:
            hashes = _profile(case, folder, options.out, line)
            words = [*MODEL.split(), "--num-layers", str(case.num_layers)]
            request = read_asked(words, folder / "cluster.toml")
            layouts = _layouts(request, number, options.others)
            for turn in range(options.rounds):
                for name, candidate in layouts.items():
                    runs = results.of(number)
                    if len(runs.get(name, [])) > turn or (turn and not _is_near(runs, name)):
                        continue
                    measured = _measure(case, candidate, request, folder / name, line, options)
                    row = {"case": number, "layout": name, "hashes": hashes, "predicted_s": candidate.step_s}
                    row |= {"measured_s": measured, "sizes": candidate.sizes, "layers": candidate.layers}
                    results.add(row | {"replicas": candidate.split.num_replicas})
                    ratio = candidate.step_s / statistics.median(measured)
                    print(
                        f"{number:2} {name:9} {candidate.sizes} {candidate.layers} predicted/measured {ratio:.3f}",
                        flush=True,
                    )
    except LinkUnavailableError as reason:
        print(f"{number:2} {case.name}: left out, {reason}", file=sys.stderr)


def _is_near(runs: Mapping[str, Sequence[dict[str, Any]]], name: str) -> bool:
    """Tell whether a layout may be as quick as the best one."""
    if not name.startswith("other"):
        return True
    return Measured.of(runs[name]).measured_s < NEAR * Measured.of(runs["best"]).measured_s


def _profile(case: EmulatedCluster, folder: Path, profiles: Path, line: WanLink | None) -> dict[str, str]:
    """Let ``profile`` write what is missing, and the cluster's file; give the hashes of the profiles."""
    words = [*MODEL.split(), "--num-layers", "2"]
    kinds = sorted({kind for kind, _, _ in case.nodes})
    for kind in kinds:
        path = profiles / f"{kind}.toml"
        if not path.exists():
            command = ["profile", *words, "--out", str(path), "--tp-sizes", "1,2,3,4", "--rounds", "10"]
            run_ranks([Seat(wait_s=KINDS[kind])], command, None, folder / f"profile-{kind}")
    links = folder / "links.toml"
    if not links.exists():
        seats = [
            Seat(wait_s=0.0, node=f"node {number}", site=site)
            for number, (_, cards, site) in enumerate(case.nodes)
            for _ in range(cards)
        ]
        command = ["profile", "--links", "--out", str(links), "--vtp-device", "cpu"]
        run_ranks(seats, [*command, "--vtp-node", "{node}", "--vtp-site", "{site}"], line, folder / "profile-links")
    text = [f'[cards.{kind}]\nprofile = "../{kind}.toml"\n' for kind in kinds]
    for kind, cards, site in case.nodes:
        at = f'site = "{site}"\n' if site else ""
        text.append(f'[[nodes]]\ncards = "{kind}"\ncards_per_node = {cards}\n{at}')
    text.append('[links]\nprofile = "links.toml"\n')
    (folder / "cluster.toml").write_text("\n".join(text))
    files = [links, *(profiles / f"{kind}.toml" for kind in kinds)]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in files}


def read_asked(words: Sequence[str], cluster: Path) -> SearchRequest:
    """Read what ``search`` is asked."""
    parser = Parser(add_help=False)
    search.add_arguments(parser)
    args, args.unknown = parser.parse_known_args([*words, "--cluster", str(cluster)])
    return read_request(args, read_cluster(cluster))


def _layouts(request: SearchRequest, number: int, num_others: int) -> dict[str, Candidate]:
    found = find_best(request.problem, num_best=1)
    layouts = {"best": found.best[0]}
    stocks = {"stock": found.stock, "equal": found.equal}
    layouts |= {name: candidate for name, candidate in stocks.items() if candidate is not None}
    known = {(one.sizes, one.layers, one.nodes) for one in layouts.values()}
    drawn: list[Candidate] = []
    for candidate in islice(_random_layouts(request, random.Random(number)), NUM_DRAWN if num_others else 0):
        if candidate is not None and (key := (candidate.sizes, candidate.layers, candidate.nodes)) not in known:
            known.add(key)
            drawn.append(candidate)
    others = drawn[: num_others // 2]
    others += sorted(drawn[len(others) :], key=lambda one: one.step_s)[: num_others - len(others)]
    return layouts | {f"other {place}": candidate for place, candidate in enumerate(others, start=1)}


def _random_layouts(request: SearchRequest, chance: random.Random) -> Iterator[Candidate | None]:
    """Yield layouts that use every node, in any order, with layers at random."""
    problem = request.problem
    while True:
        split = chance.choice(problem.splits)
        stage_types: list[StageType] = []
        for place, pool in enumerate(split.pools):
            for room in pool.cards_per_node:
                sizes = [size for size in pool.speeds if size * split.num_replicas <= room]
                if sizes:
                    size = chance.choice(sizes)
                    number = chance.randint(1, room // (size * split.num_replicas))
                    stage_types += [StageType((place,) * split.num_replicas, size)] * number
        if not stage_types or len(stage_types) > problem.num_layers:
            continue
        chance.shuffle(stage_types)
        cuts = sorted(chance.sample(range(1, problem.num_layers), len(stage_types) - 1))
        ends = [0, *cuts, problem.num_layers]
        layers = [end - start for start, end in pairwise(ends)]
        yield evaluate(SearchSpace.of(problem, split), stage_types, layers)


def _measure(
    case: EmulatedCluster,
    candidate: Candidate,
    request: SearchRequest,
    log: Path,
    line: WanLink | None,
    options: argparse.Namespace,
) -> list[float]:
    words = [*MODEL.split(), *TRAINING.split(), "--num-layers", str(case.num_layers)]
    words += [*search.flags(request, candidate), "--train-iters", str(NUM_WARM + options.steps + 1)]
    layout = PipelineLayout.from_sizes(candidate.sizes, world_size=candidate.num_cards)
    kinds = [kind for kind, _, _ in case.nodes]
    waits = dict(KINDS)
    if options.swapped:
        one, other = sorted(set(kinds))[:2]
        waits[one], waits[other] = waits[other], waits[one]
    seats: list[Seat] = []
    for rank in range(candidate.num_cards):
        stage = layout.stage_of(rank)
        replica = next(r for r in range(layout.stages[stage].dp) if rank in layout.tp_ranks(stage, r, 0))
        kind, _, site = case.nodes[candidate.nodes[stage][replica][0]]
        seats.append(Seat(wait_s=waits[kind], site=site))
    marks = run_ranks(seats, ["run", str(ROOT / "examples" / "pretrain_gpt.py"), *words], line, log)
    return [end - start for (start, _), (end, _) in pairwise(marks)][NUM_WARM:]


def _table(results: Results) -> Iterator[str]:
    yield "| cluster | layout | TP sizes | layers | replicas | predicted ms | measured ms | predicted / measured |"
    yield "|---|---|---|---|---|---|---|---|"
    pairs: list[str] = []
    for number, case in enumerate(CASES, start=1):
        rows = {name: Measured.of(runs) for name, runs in results.of(number).items()}
        for name in [name for name in ("best", "stock", "equal") if name in rows]:
            one = rows[name]
            yield (
                f"| {case.name} | {name} | {one.layout} | {1e3 * one.predicted_s:.0f} | {1e3 * one.measured_s:.0f} | "
                f"{one.predicted_s / one.measured_s:.3f} |"
            )
        if {"best", "stock"} <= rows.keys():
            pairs.append(f"| {case.name} | {_gain(rows, 'stock')} | {_gain(rows, 'equal')} | {_regret(rows)} |")
    yield ""
    yield "| cluster | best / stock, predicted | measured | best / equal, predicted | measured | regret |"
    yield "|---|---|---|---|---|---|"
    yield from pairs


def _gain(rows: Mapping[str, Measured], name: str) -> str:
    """Give the best step over another one, as predicted and as measured."""
    if name not in rows:
        return "- | -"
    best, other = rows["best"], rows[name]
    return f"{best.predicted_s / other.predicted_s:.3f} | {best.measured_s / other.measured_s:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A layout that ran.

    Attributes:
        layout: list, layers and replicas, as cells of a table.
        predicted_s: predicted seconds of a step.
        measured_s: median of the measured seconds of a step.
        high_s: upper end of the 95 % interval of the median.
        low_s: lower end of that interval.
    """

    layout: str
    predicted_s: float
    measured_s: float
    low_s: float
    high_s: float

    @classmethod
    def of(cls, runs: Sequence[dict[str, Any]]) -> Measured:
        """Take the runs of one layout together."""
        steps = sorted(each for run in runs for each in run["measured_s"])
        # Ranks between which the median lies with 95 %, as of a binomial distribution.
        reach = 0.98 * math.sqrt(len(steps))
        middle = (len(steps) - 1) / 2
        low, high = max(0, math.floor(middle - reach)), min(len(steps) - 1, math.ceil(middle + reach))
        first = runs[0]
        return cls(
            layout=f"{_join(first['sizes'])} | {_join(first['layers'])} | {first['replicas']}",
            predicted_s=first["predicted_s"],
            measured_s=statistics.median(steps),
            low_s=steps[low],
            high_s=steps[high],
        )


def _regret(rows: Mapping[str, Measured]) -> str:
    """Say how much quicker the quickest other layout is, beyond the 95 % intervals."""
    others = [one for name, one in rows.items() if name.startswith("other")]
    if not others:
        return "-"
    quickest = min(others, key=lambda one: one.measured_s)
    beyond = max(0.0, rows["best"].low_s / quickest.high_s - 1)
    return f"{100 * beyond:.1f} % of {len(others)}; quickest / best {quickest.measured_s / rows['best'].measured_s:.3f}"


def _join(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


if __name__ == "__main__":
    main()
