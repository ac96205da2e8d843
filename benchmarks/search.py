"""How long a search takes on large clusters, on one core.

    python -m benchmarks.search

Nodes of eight cards, of one kind or half of them twice as slow, a model of 96 layers, 1024 samples a step. Printed are
the seconds of the processor, whether every list was bounded, and the best step over that of stock Megatron, with any
layers and with equally many on all stages.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.cluster.stage_memory import HeldPart
from vtp_plugin.tune.search.find_best import find_best
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
    tp, num_replicas, start, end, _, _, in_flight = part
    state = (end - start) * 400_000_000 * 6 // tp + (end - start) * 400_000_000 * 12 // tp // num_replicas
    return state + in_flight * (end - start) * (1 << 30) // tp


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-s", type=float, default=600.0)
    options = parser.parse_args()
    for num_nodes in (16, 64):
        for is_mixed in (False, True):
            start = time.process_time()
            found = find_best(problem(num_nodes, is_mixed=is_mixed), limit_s=options.limit_s)
            seconds = time.process_time() - start
            kinds = "two kinds" if is_mixed else "one kind "
            best = found.best[0]
            share = ", ".join(
                f"{best.step_s / one.step_s:.3f} of {name}" if one else f"no {name} layout"
                for name, one in (("stock", found.stock), ("equal", found.equal))
            )
            end = "all bounded" if found.is_complete else "not all bounded"
            print(
                f"{num_nodes:3} nodes, {kinds}: {seconds:6.1f} s, {end}, {found.num_simulated} simulated; best {share}"
            )
            print(f"    sizes {best.sizes} layers {best.layers} replicas {best.split.num_replicas}", flush=True)


if __name__ == "__main__":
    main()
