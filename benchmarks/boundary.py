"""How fast a tensor crosses a boundary: every strategy side by side, against the floor that the links set.

    python -m benchmarks.boundary --output docs/evidence/boundary.json --plot docs/evidence/boundary.svg
    python -m benchmarks.boundary --quick
    python -m benchmarks.boundary --plot docs/evidence/boundary.svg --from docs/evidence/boundary.json  # alone

Two networks on this machine: links of 200 Mbit/s each way per rank toward the other stage and no limit inside a stage
(network namespaces, see ``links.py``; needs root, skipped elsewhere), and loopback without limits. Every rank has one
thread. An exchange is timed from one start time for all ranks to the last finisher; the strategies take turns in every
round, so that a slow moment of the machine hits all of them, and what is printed are medians.

The floor is the number of bytes on the busiest link over the measured goodput of one link, for the best plan there is:
all links of either stage carry equal shares. What the receiving stage does afterwards counts as time, not as floor.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name service in the namespaces: c10d warns on every group

import torch
import torch.distributed as dist

from benchmarks.boundary_plot import draw
from benchmarks.boundary_report import report
from benchmarks.boundary_results import KIB, MIB, ONE_LINK, Record, Results, load, save, shape_of
from benchmarks.exchanges import Exchange, build_exchanges
from benchmarks.finish import time_finishes
from benchmarks.links import LinksUnavailableError
from benchmarks.ranks import Stages, run_ranks
from benchmarks.turns import measure_in_turn

GOODPUT_BYTES = (256 * KIB, 16 * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How much is measured.

    Attributes:
        pairs: tensor-parallel sizes upstream and downstream.
        sizes_bytes: sizes of the tensors that cross, in bytes.
        finish_tp_sizes: tensor-parallel sizes of the stages whose finishes are compared.
        finish_bytes: sizes of the tensors that finishes complete, in bytes.
        num_rounds: number of times that every strategy gets its turn.
    """

    pairs: tuple[tuple[int, int], ...]
    sizes_bytes: tuple[int, ...]
    finish_tp_sizes: tuple[int, ...]
    finish_bytes: tuple[int, ...]
    num_rounds: int


FULL = Extent(
    pairs=((1, 4), (4, 1), (2, 4), (4, 4), (2, 3)),
    sizes_bytes=(16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    finish_tp_sizes=(2, 3, 4),
    finish_bytes=(256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    num_rounds=5,
)
QUICK = Extent(
    pairs=((1, 4), (2, 3)),
    sizes_bytes=(64 * KIB, MIB, 4 * MIB),
    finish_tp_sizes=(3,),
    finish_bytes=(MIB, 4 * MIB),
    num_rounds=3,
)


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = _options()
    if options.turns:
        run_ranks(options.sizes, None, partial(_measure_in_turn, address=options.turns))
        return
    results = load(options.source) if options.source else _measure(QUICK if options.quick else FULL, options)
    print(report(results))
    if options.output:
        save(results, options.output)
    if options.plot:
        options.plot.write_text(draw(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs, small tensors, three rounds")
    parser.add_argument("--mbit", type=float, default=200.0, help="rate of a limited link, each way")
    parser.add_argument("--only", choices=("boundaries", "finishes"), help="measure one of the two parts")
    parser.add_argument("--turns", help="measure on loopback when told so over this address, see turns.py")
    parser.add_argument("--sizes", type=_pair, default=(1, 4), help="of both stages, with --turns")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    parser.add_argument("--plot", type=Path, help="write the picture as SVG")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing: read results written before")
    return parser.parse_args()


def _pair(text: str) -> tuple[int, int]:
    upstream, downstream = map(int, text.split(","))
    return upstream, downstream


def _measure(extent: Extent, options: argparse.Namespace) -> Results:
    boundaries: list[Record] = []
    finishes: list[Record] = []
    for network, mbit in (("limited", options.mbit), ("loopback", None)):
        try:
            if options.only != "boundaries":
                for tp_size in extent.finish_tp_sizes:
                    job = partial(_time_finishes, network=network, extent=extent)
                    finishes += run_ranks((1, tp_size), mbit, job)
            if options.only != "finishes":
                for pair in extent.pairs:
                    boundaries += run_ranks(pair, mbit, partial(_time_boundary, network=network, extent=extent))
                    print(f"{network} {pair}: measured", file=sys.stderr)
        except LinksUnavailableError as error:
            print(f"limited links: skipped, {error}")
    settings = {
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}",
        "torch": f"{torch.__version__}, gloo, one thread a rank",
        "links": f"{options.mbit:g} Mbit/s each way per rank toward the other stage, no limit inside a stage",
        "rounds": f"{extent.num_rounds}, medians",
    }
    return Results(settings=settings, boundaries=tuple(boundaries), finishes=tuple(finishes))


def _time_finishes(stages: Stages, network: str, extent: Extent) -> list[Record]:
    return time_finishes(stages, network, list(extent.finish_bytes), extent.num_rounds)


def _time_boundary(stages: Stages, network: str, extent: Extent) -> list[Record]:
    """Time every exchange between two stages. Collective."""
    exchanges = build_exchanges(stages)
    _warm_up(stages, exchanges)
    records = _time_one_link(stages, extent.num_rounds) if network == "limited" else []
    times_s: dict[tuple[int, str], list[float]] = {}
    names = list(exchanges)
    for num_round in range(extent.num_rounds):
        for num_bytes in extent.sizes_bytes:
            tensor = torch.ones(shape_of(num_bytes)) if stages.is_src else None
            # Nobody is always the first after the same other one.
            for name in names[num_round % len(names) :] + names[: num_round % len(names)]:
                act = partial(exchanges[name], tensor, shape_of(num_bytes))
                repeated = [stages.time(act) for _ in range(_num_repeats(network, num_bytes))]
                times_s.setdefault((num_bytes, name), []).extend(repeated)
    return records + [
        Record(network=network, sizes=stages.sizes, name=name, num_bytes=num_bytes, times_s=tuple(values))
        for (num_bytes, name), values in times_s.items()
    ]


def _measure_in_turn(stages: Stages, address: str) -> None:
    """Time the plugin's own exchanges whenever the other program does not. Collective."""
    exchanges = {name: each for name, each in build_exchanges(stages).items() if name in ("rank0", "sliced")}
    _warm_up(stages, exchanges)

    def measure() -> dict[str, float]:
        figures = {}
        for num_bytes in (MIB, 4 * MIB):
            tensor = torch.ones(shape_of(num_bytes)) if stages.is_src else None
            for name, exchange in exchanges.items():
                act = partial(exchange, tensor, shape_of(num_bytes))
                times_s = [stages.time(act) for _ in range(_num_repeats("loopback", num_bytes))]
                figures[f"{name}, {num_bytes // MIB} MiB, ms"] = statistics.median(times_s) * 1e3
        return figures

    measure_in_turn(address, measure)


def _num_repeats(network: str, num_bytes: int) -> int:
    """Give the number of exchanges at one turn: short ones are cheap, and vary more."""
    limits = {"limited": ((MIB, 3), (64 * MIB, 1)), "loopback": ((4 * MIB, 5), (16 * MIB, 2), (64 * MIB, 1))}
    return next(count for most_bytes, count in limits[network] if num_bytes <= most_bytes)


def _warm_up(stages: Stages, exchanges: dict[str, Exchange]) -> None:
    """Use every connection for a while, and check that every exchange delivers."""
    for num_bytes in (64 * KIB, MIB, MIB):
        shape = shape_of(num_bytes)
        whole = torch.rand(shape, generator=torch.Generator().manual_seed(1))
        for name, exchange in exchanges.items():
            received = exchange(whole if stages.is_src else None, shape)
            if received is not None:
                _assert_delivered(name, received, whole, stages)
            dist.barrier()


def _assert_delivered(name: str, received: torch.Tensor, whole: torch.Tensor, stages: Stages) -> None:
    expected = whole
    if received.shape != whole.shape:
        position = stages.rank - stages.dst_ranks[0]
        expected = torch.tensor_split(whole, stages.sizes[1])[position]
    assert torch.equal(received, expected), f"{name} delivered wrong data to rank {stages.rank}"


def _time_one_link(stages: Stages, num_rounds: int) -> list[Record]:
    """Time a message from the first rank upstream to the first downstream while all others are quiet. Collective."""
    src, dst = stages.src_ranks[0], stages.dst_ranks[0]
    records = []
    for num_bytes in GOODPUT_BYTES:
        tensor = torch.zeros(shape_of(num_bytes))

        def act(tensor: torch.Tensor = tensor) -> None:
            if stages.rank == src:
                dist.send(tensor, dst)
            elif stages.rank == dst:
                dist.recv(tensor, src)

        num_times = num_rounds if num_bytes > MIB else 4 * num_rounds
        times_s = [stages.time(act) for _ in range(2 + num_times)][2:]
        records.append(
            Record(network="limited", sizes=stages.sizes, name=ONE_LINK, num_bytes=num_bytes, times_s=tuple(times_s))
        )
    return records


if __name__ == "__main__":
    main()
