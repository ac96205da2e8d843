"""How fast a tensor crosses a bridge between two modules: Megatron's bridge, the plugin's, and the floor of the links.

    python -m benchmarks.bridge
    python -m benchmarks.bridge --quick

Links as in ``benchmarks.boundary``, of 25 Mbit/s each way per rank toward the other module and no limit inside one
(network namespaces; needs root), one start time for all ranks, the last finisher counts, both bridges take turns in
every round, medians. The floor is the bytes on the busiest link of the plugin's plan over the goodput of one link,
which is measured in the same run. For comparison *bare* sends and receives the same bytes over the same links, one
message each into memory that is there, without the plugin: what bare takes beyond the floor is the backend's and the
links' own. The links are so slow that 4 MiB take a third of a second: with faster ones two cores that play eight ranks
would be measured. ``--mbit`` sets another rate, and ``--pair`` takes one pair of modules only.

    python -m benchmarks.bridge --colocated

Modules on the same four ranks, over loopback without a limit: the plugin's communicator as it is by default, with
``extended=True``, with ``has_fixed_shape=True`` besides, and the backend's bare all-gather of the same tensor.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no name service in the namespaces: c10d warns on every group

import torch
import torch.distributed as dist
from megatron.core.hyper_comm_grid import HyperCommGrid
from megatron.core.pipeline_parallel.bridge_communicator import BridgeCommunicator as StockBridge

from benchmarks.boundary_results import MIB
from benchmarks.links import LinksUnavailableError
from benchmarks.ranks import Stages, run_ranks
from vtp_plugin.api import choose_device
from vtp_plugin.bridge import BridgeCommunicator, ColocatedBridgeCommunicator
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, Transfer, egress_bytes, ingress_bytes
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec
from vtp_plugin.plan.boundary.endpoint import BridgeEndpoint, boundary_ranks

_NAMES = ["tp", "cp", "pp", "dp"]
_BATCH, _WIDTH = 12, 256
_COLOCATED = ("bare", "default", "extended", "fixed")
_Message = tuple[torch.Tensor, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two modules: tensor-parallel and data-parallel sizes."""

    src: tuple[int, int]
    dst: tuple[int, int]

    @property
    def num_ranks(self) -> tuple[int, int]:
        """Ranks of either module."""
        return self.src[0] * self.src[1], self.dst[0] * self.dst[1]

    def grids(self) -> list[Any]:
        """Make the grids of both modules."""
        offsets = (0, self.num_ranks[0])
        return [
            HyperCommGrid([tp, 1, 1, dp], _NAMES, offset)
            for (tp, dp), offset in zip((self.src, self.dst), offsets, strict=True)
        ]

    def plan(self) -> BoundaryPlan:
        """Plan the way of a tensor of 12 samples, as the plugin does."""
        offsets = (0, self.num_ranks[0])
        src, dst = (
            BridgeEndpoint(ranks=boundary_ranks([tp, 1, 1, dp], _NAMES, offset, is_last=True))
            for (tp, dp), offset in zip((self.src, self.dst), offsets, strict=True)
        )
        return BridgeSpec.between("", src, dst, num_dims=3).plan((2520, _BATCH, 1))

    def busiest_share(self) -> float:
        """Return the part of the whole tensor that the busiest link of the plugin's plan carries."""
        plan = self.plan()
        carried = max(*egress_bytes(plan, 1).values(), *ingress_bytes(plan, 1).values())
        return carried / math.prod(plan.src.shape)

    def __str__(self) -> str:
        """Write the sizes: `tp 2 dp 2 -> tp 4 dp 1`."""
        return " -> ".join(f"tp {tp} dp {dp}" for tp, dp in (self.src, self.dst))


PAIRS = (
    Pair(src=(2, 1), dst=(2, 1)),
    Pair(src=(4, 1), dst=(4, 1)),
    Pair(src=(2, 2), dst=(4, 1)),
    Pair(src=(4, 1), dst=(2, 2)),
    Pair(src=(1, 2), dst=(1, 3)),
)


class _StockOnGloo(StockBridge):
    """Megatron's bridge, whose groups ask for NCCL, on the world's backend."""

    @classmethod
    def _get_or_create_broadcast_pg(cls, ranks_list: list[list[int]]) -> Any:
        return dist.new_subgroups_by_enumeration(ranks_list)[0]

    @classmethod
    def _get_or_create_bridge_pg(cls, ranks: list[int]) -> Any:
        return dist.new_group(sorted(ranks))


def main() -> None:
    """Measure all pairs and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two pairs, 4 MiB, three rounds")
    parser.add_argument("--colocated", action="store_true", help="modules on the same ranks")
    parser.add_argument("--mbit", type=float, default=25.0, help="rate of a link, each way")
    parser.add_argument("--pair", type=int, choices=range(len(PAIRS)), help="this pair of modules only, counted from 0")
    options = parser.parse_args()
    choose_device("cpu")
    pairs = PAIRS[:1] + PAIRS[2:3] if options.quick else PAIRS
    if options.pair is not None:
        pairs = (PAIRS[options.pair],)
    sizes_bytes = (4 * MIB,) if options.quick else (MIB, 4 * MIB, 16 * MIB)
    rounds = 3 if options.quick else 5
    if options.colocated:
        _print_colocated(sizes_bytes, 3 * rounds)
        return
    print("| modules | MiB | Mbit/s | stock ms | ours ms | bare ms | floor ms ", end="")
    print("| ours / floor | bare / floor | stock / ours |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for pair in pairs:
        try:
            job = partial(_measure, pair=pair, sizes_bytes=sizes_bytes, num_rounds=rounds)
            times_s, goodput = run_ranks(pair.num_ranks, options.mbit, job)
        except LinksUnavailableError as error:
            sys.exit(f"limited links: skipped, {error}")
        for size_bytes in sizes_bytes:
            _print_row(pair, size_bytes, options.mbit, times_s[size_bytes], goodput)


def _print_row(pair: Pair, size_bytes: int, mbit: float, times_s: Mapping[str, float], goodput: float) -> None:
    floor_s = size_bytes * pair.busiest_share() / goodput
    ours_s, bare_s, stock_s = times_s["ours"], times_s["bare"], times_s.get("stock")
    stock = ("not supported", "-") if stock_s is None else (f"{1e3 * stock_s:.0f}", f"{stock_s / ours_s:.2f}")
    milliseconds = " | ".join(f"{1e3 * seconds:.0f}" for seconds in (ours_s, bare_s, floor_s))
    print(
        f"| {pair} | {size_bytes / MIB:g} | {mbit:g} | {stock[0]} | {milliseconds} | "
        f"{ours_s / floor_s:.2f} | {bare_s / floor_s:.2f} | {stock[1]} |",
        flush=True,
    )


def _measure(
    stages: Stages, pair: Pair, sizes_bytes: tuple[int, ...], num_rounds: int
) -> tuple[dict[int, dict[str, float]], float]:
    """Time both bridges in turn; return medians in seconds, and bytes per second of one link. Collective."""
    axes = {"s": 0, "b": 1, "h": 2}
    bridges: dict[str, Any] = {}
    if max(pair.src[1], pair.dst[1]) % min(pair.src[1], pair.dst[1]) == 0:
        bridges["stock"] = _StockOnGloo(*pair.grids(), axes, torch.float32)
    bridges["ours"] = BridgeCommunicator(*pair.grids(), axes, torch.float32, has_gradient=False)
    times_s: dict[tuple[int, str], list[float]] = {}
    for num_round in range(-1, num_rounds):
        for size_bytes in sizes_bytes:
            rows = size_bytes // (4 * _BATCH * _WIDTH)
            share = torch.ones(rows, _BATCH // pair.src[1], _WIDTH) if stages.is_src else None
            acts = {name: partial(_cross, bridge, share) for name, bridge in bridges.items()}
            acts["bare"] = partial(_send_bare, *_bare_messages(pair.plan(), stages.rank, size_bytes))
            for name, act in acts.items():
                seconds = stages.time(act)
                if num_round >= 0:
                    times_s.setdefault((size_bytes, name), []).append(seconds)
    medians = {
        size_bytes: {name: statistics.median(times_s[size_bytes, name]) for name in (*bridges, "bare")}
        for size_bytes in sizes_bytes
    }
    return medians, _goodput(stages, num_rounds)


def _bare_messages(plan: BoundaryPlan, rank: int, size_bytes: int) -> tuple[list[_Message], list[_Message]]:
    """Make memory for what a rank receives in a plan, and for what it sends; with the other rank of each."""

    def memory(transfer: Transfer) -> torch.Tensor:
        return torch.ones(transfer.num_elements * size_bytes // (4 * math.prod(plan.src.shape)))

    received = [(memory(transfer), transfer.src) for transfer in plan.receives_of(rank)]
    return received, [(memory(transfer), transfer.dst) for transfer in plan.sends_of(rank)]


def _send_bare(received: list[_Message], sent: list[_Message]) -> None:
    works = [dist.irecv(tensor, peer) for tensor, peer in received]
    works += [dist.isend(tensor, peer) for tensor, peer in sent]
    for work in works:
        assert work is not None
        work.wait()


def _cross(bridge: Any, share: torch.Tensor | None) -> None:
    if share is None:
        bridge.recv_forward()
    else:
        bridge.send_forward(share)


def _print_colocated(sizes_bytes: tuple[int, ...], num_rounds: int) -> None:
    """Measure a fan-in over four ranks in place, and print a table."""
    print("| MiB | all-gather ms | default ms | extended ms | fixed ms | default | extended | fixed / all-gather |")
    print("|---|---|---|---|---|---|---|---|")
    times_s = run_ranks((2, 2), None, partial(_measure_colocated, sizes_bytes=sizes_bytes, num_rounds=num_rounds))
    for size_bytes in sizes_bytes:
        bare_s, *others_s = (times_s[size_bytes][name] for name in _COLOCATED)
        shown = [f"{size_bytes / MIB:g}", *(f"{1e3 * seconds:.1f}" for seconds in (bare_s, *others_s))]
        print(f"| {' | '.join((*shown, *(f'{seconds / bare_s:.2f}' for seconds in others_s)))} |", flush=True)


def _measure_colocated(stages: Stages, sizes_bytes: tuple[int, ...], num_rounds: int) -> dict[int, dict[str, float]]:
    """Time dp 4 -> tp 4 on four ranks; each has a quarter of the batch, and all get all of it. Collective."""
    world = sum(stages.sizes)
    grids = [HyperCommGrid(shape, _NAMES, 0) for shape in ([1, 1, 1, world], [world, 1, 1, 1])]
    axes = {"b": 0, "s": 1, "h": 2}
    wide = partial(ColocatedBridgeCommunicator, *grids, dim_mapping=axes, extended=True, src_sequence="plain")
    bridges = {"default": ColocatedBridgeCommunicator(*grids, dim_mapping=axes), "extended": wide()}
    fixed = {size_bytes: wide(has_fixed_shape=True) for size_bytes in sizes_bytes}
    times_s: dict[tuple[int, str], list[float]] = {}
    for num_round in range(-1, num_rounds):
        for size_bytes in sizes_bytes:
            share = torch.ones(_BATCH // world, size_bytes // (4 * _BATCH * _WIDTH), _WIDTH)
            acts = {name: partial(bridge.communicate, share) for name, bridge in bridges.items()}
            acts["fixed"] = partial(fixed[size_bytes].communicate, share)
            acts["bare"] = partial(_all_gather, share, world)
            for name, act in acts.items():
                seconds = stages.time(act)
                if num_round >= 0:
                    times_s.setdefault((size_bytes, name), []).append(seconds)
    return {
        size_bytes: {name: statistics.median(times_s[size_bytes, name]) for name in _COLOCATED}
        for size_bytes in sizes_bytes
    }


def _all_gather(share: torch.Tensor, num_ranks: int) -> torch.Tensor:
    whole = torch.empty(num_ranks * len(share), *share.shape[1:])
    dist.all_gather_into_tensor(whole, share)
    return whole


def _goodput(stages: Stages, num_rounds: int) -> float:
    """Return the bytes per second of one link while all others are quiet: what 16 MiB take longer than 1 MiB."""
    src, dst = stages.src_ranks[0], stages.dst_ranks[0]

    def seconds(num_bytes: int) -> float:
        tensor = torch.zeros(num_bytes // 4)

        def act() -> None:
            if stages.rank == src:
                dist.send(tensor, dst)
            elif stages.rank == dst:
                dist.recv(tensor, src)

        return statistics.median([stages.time(act) for _ in range(num_rounds)])

    return (16 * MIB - MIB) / (seconds(16 * MIB) - seconds(MIB))


if __name__ == "__main__":
    main()
