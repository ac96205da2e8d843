"""How long a search takes on large clusters, on one core; and whether a change to the search finds other layouts.

    python -m benchmarks.search
    python -m benchmarks.search --output FILE --emulated FOLDER --sailor PATH              what is found, as JSON
    python -m benchmarks.search --output FILE --emulated FOLDER --sailor PATH --before OLD     beside an earlier FILE

Large clusters: nodes of eight cards, of one kind or half of them twice as slow, a model of 96 layers, 1024 samples a
step. Printed are the seconds of the processor, whether every list was bounded, and the best step over that of stock
Megatron, with any layers and with equally many on all stages.

With ``--output`` also the clusters that tests compare with brute force (``tests/property``), those that ``reality.py``
has profiled into FOLDER, and those of ``published.py`` are asked. Beside OLD stand, for each of these groups, how many
winners are others and by how much their steps are longer at most, and the seconds of both.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import reality
from benchmarks.published_cluster import ask, read_artifact, read_cluster
from benchmarks.published_quoted import CLUSTERS
from tests.property import test_search_interleaved, test_search_properties, test_search_u_shape
from vtp_plugin.tune.cluster.read_cluster import HeldPart
from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import SearchResult, find_best
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem

_NUM_LAYERS = 96
_LAYER_S = 0.01
_BETWEEN = Link(latency_s=1e-5, bytes_per_s=25e9)
_INSIDE = Link(latency_s=5e-6, bytes_per_s=300e9)


def _speed(pace: float, tp: int, num_replicas: int) -> Speed:
    """A layer of 400 million parameters; cutting it into eight costs 12 %."""
    forward = pace * _LAYER_S / tp * (1 + 0.015 * (tp - 1))
    return Speed(
        forward_s=(forward,) * _NUM_LAYERS,
        backward_s=(2 * forward,) * _NUM_LAYERS,
        last_s=(2 * forward, 4 * forward),
        update_s=(0.003 / tp / num_replicas,) * _NUM_LAYERS,
        gradient_bytes=(round(800e6 / tp),) * _NUM_LAYERS,
    )


def problem(num_nodes: int, *, is_mixed: bool) -> SearchProblem:
    """Make a cluster, and the problem of its best layout.

    Args:
        num_nodes: number of nodes of eight cards.
        is_mixed: whether half of them have slower cards.
    """
    paces: Sequence[tuple[float, int]] = ((1.0, num_nodes),)
    if is_mixed:
        paces = ((1.0, num_nodes - num_nodes // 2), (2.0, num_nodes // 2))
    splits = tuple(
        BatchSplit(
            num_replicas=replicas,
            num_microbatches=1024 // replicas,
            micro_batch_size=1,
            pools=tuple(
                NodePool(
                    name=f"pace {pace}",
                    cards_per_node=(8,) * number,
                    speeds={tp: _speed(pace, tp, replicas) for tp in (1, 2, 4, 8)},
                    inside=_INSIDE,
                    between=_BETWEEN,
                    memory_bytes=80 << 30,
                )
                for pace, number in paces
            ),
            message_bytes=64 << 20,
            held_bytes=_held_bytes,
        )
        for replicas in (1, 2, 4, 8, 16, 32, 64)
    )
    return SearchProblem(num_layers=_NUM_LAYERS, splits=splits, least_stages=1, most_stages=_NUM_LAYERS)


def _held_bytes(part: HeldPart) -> int:
    tp, num_replicas, start, end, _, _, in_flight, _ = part
    state = (end - start) * 400_000_000 * 6 // tp + (end - start) * 400_000_000 * 12 // tp // num_replicas
    return state + in_flight * (end - start) * (1 << 30) // tp


class Asked(NamedTuple):
    """A problem that a search is asked, and the group that it belongs to."""

    group: str
    name: str
    problem: SearchProblem


def large() -> Iterator[Asked]:
    """Yield the large clusters."""
    for num_nodes, is_mixed in product((16, 64), (False, True)):
        name = f"{num_nodes:3} nodes, {'two kinds' if is_mixed else 'one kind '}"
        yield Asked(name.strip(), name, problem(num_nodes, is_mixed=is_mixed))


def small() -> Iterator[Asked]:
    """Yield what the tests ask."""
    for seed in range(320):
        yield Asked("any order", str(seed), test_search_properties.asked(seed)[0])
    for seed in (43, 396):
        yield Asked("missed before 07f7fba", str(seed), test_search_properties.asked(seed, num_layers=6)[0])
    for seed in range(100):
        yield Asked("interleaved", str(seed), test_search_interleaved.asked(seed)[0])
        yield Asked("U", str(seed), test_search_u_shape.random_question(seed))


def emulated(folder: Path) -> Iterator[Asked]:
    """Yield the clusters that ``benchmarks.reality`` has profiled."""
    for number, case in enumerate(reality.CASES, start=1):
        words = [*reality.MODEL.split(), "--num-layers", str(case.num_layers)]
        request = reality.read_asked(words, folder / f"{number:02}" / "cluster.toml")
        yield Asked("emulated", case.name, request.problem)


def published(sailor: Path) -> Iterator[Asked]:
    """Yield the clusters of published planners."""
    artifact = read_artifact(sailor)
    for counts in CLUSTERS:
        name = "+".join(map(str, counts))
        yield Asked(f"published {name}", name, ask(artifact, read_cluster(artifact, counts)).problem)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--output", type=Path, help="write what is found in all cases, as JSON")
    parser.add_argument("--emulated", type=Path, metavar="FOLDER", help="that benchmarks.reality has profiled into")
    parser.add_argument("--sailor", type=Path, metavar="PATH", help="of a checkout, see benchmarks.published")
    parser.add_argument("--before", type=Path, metavar="OLD", help="what another search found")
    parser.add_argument("--without-large", action="store_true", help="leave out the large clusters")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for asked in _every(options):
        start = time.process_time()
        found = find_best(asked.problem, limit_s=options.limit_s)
        seconds = time.process_time() - start
        rows.setdefault(asked.group, {})[asked.name] = _row(found, seconds)
        if asked.group == asked.name.strip():
            _print(asked.name, found, seconds)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1) + "\n")
    if options.before:
        print("\n".join(_beside(json.loads(options.before.read_text()), rows)))


def _every(options: argparse.Namespace) -> Iterator[Asked]:
    if not options.without_large:
        yield from large()
    if options.output:
        yield from small()
    if options.emulated:
        yield from emulated(options.emulated)
    if options.sailor:
        yield from published(options.sailor)


def _row(found: SearchResult, seconds: float) -> dict[str, Any]:
    """Write down what was found."""

    def layout(one: Candidate | None) -> dict[str, Any] | None:
        if one is None:
            return None
        flags = {"sizes": one.sizes, "layers": one.layers, "chunks": one.num_chunks, "replicas": one.num_replicas}
        flags |= {"sites": one.sites, "micro_batch_size": one.split.micro_batch_size, "transport": one.transport}
        flags |= {"is_planned": one.order.is_planned, "in_flight": one.order.in_flight}
        return {"step_s": one.step_s, "flags": json.loads(json.dumps(flags))}

    layouts = {"best": next(iter(found.best), None), "stock": found.stock, "equal": found.equal}
    row = {name: layout(candidate) for name, candidate in layouts.items()}
    return {"seconds": seconds, "is_complete": found.is_complete, "num_simulated": found.num_simulated, **row}


def _beside(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Compare what two searches found, group by group."""
    yield "| group | layouts | others | longest step / before | seconds, before | after | simulated, before | after |"
    yield "|---|---|---|---|---|---|---|---|"
    for group, rows in after.items():
        olds = before.get(group, {})
        pairs = [
            (f"{name} {kind}", olds[name][kind], row[kind])
            for name, row in rows.items()
            if name in olds
            for kind in ("best", "stock", "equal")
        ]
        lost = [name for name, old, new in pairs if (old is None) != (new is None)]
        both = [(name, old, new) for name, old, new in pairs if old is not None and new is not None]
        others = [name for name, old, new in both if old["flags"] != new["flags"]]
        most, where = max(((new["step_s"] / old["step_s"], name) for name, old, new in both), default=(1.0, ""))
        sums = [
            f"{sum(one[name][what] for name in rows if name in olds):.1f}"
            for what in ("seconds", "num_simulated")
            for one in (olds, rows)
        ]
        cells = [group, str(len(both)), str(len(others)), f"{most:.4f}" + f" ({where})" * (most > 1), *sums]
        yield "| " + " | ".join(cells) + " |" + f" found in one of both only: {', '.join(lost)}" * bool(lost)


def _print(name: str, found: SearchResult, seconds: float) -> None:
    best = found.best[0]
    share = ", ".join(
        f"{best.step_s / one.step_s:.3f} of {kind}" if one else f"no {kind} layout"
        for kind, one in (("stock", found.stock), ("equal", found.equal))
    )
    end = "all bounded" if found.is_complete else "not all bounded"
    print(f"{name}: {seconds:6.1f} s, {end}, {found.num_simulated} simulated; best {share}")
    print(f"    sizes {best.sizes} layers {best.layers} replicas {best.split.num_replicas}", flush=True)


if __name__ == "__main__":
    main()
