"""What start-up costs a rank: process groups, memberships and time, for worlds of up to 4,096 ranks, on one CPU.

    python benchmarks/startup.py

The world is torch's fake process group: nothing is sent, but Megatron's own ``initialize_model_parallel`` runs and
every ``new_group`` call is made. Each row is one rank: the first of the first stage (leader), the last of the world.
Compared are stock Megatron with one size, the plugin with the same uniform list forced on, and a list with a narrow
first stage. What a membership costs: on gloo, at creation, 3 threads and 3 + W descriptors for W members; on NCCL and
HCCL nothing before the first message, then a communicator (HCCL: 2 x its buffer size, by default 2 x 200 MB, for a pair
2 x 20 MB). The last columns count the pipeline channels, and those on which the rank itself sends or receives.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import vtp_plugin
from vtp_plugin.boundary.pipeline import pipeline_boundaries
from vtp_plugin.layout.channel import Direction
from vtp_plugin.layout.pipeline import PipelineLayout


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of start-up for one rank."""

    num_calls: int
    num_memberships: int
    num_members: int
    time_s: float


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[64, 512, 4096])
    options = parser.parse_args()
    import megatron.core.parallel_state  # noqa: F401  not part of what is measured

    print(
        f"{'ranks':>5} {'layout':28} {'rank':>5} {'new_group calls':>15} {'member of':>9} {'members':>8} {'time s':>7} "
        f"{'channels':>8} {'of them used':>12}"
    )
    for world_size in options.world_sizes:
        uniform = [8] * 8
        # As many ranks a replica, the first stage narrow.
        unequal = [1, *[9] * 7]
        for name, sizes, force in (
            ("stock Megatron, 8 x 8", uniform, None),
            ("plugin forced on, 8 x 8", uniform, True),
            ("plugin, 1 + 7 x 9", unequal, False),
        ):
            for rank in (0, world_size - 1):
                cost = _measure(sizes, force, rank, world_size)
                channels, used = (0, 0) if force is None else _channels(sizes, rank, world_size)
                print(
                    f"{world_size:5d} {name:28} {rank:5d} {cost.num_calls:15d} {cost.num_memberships:9d} "
                    f"{cost.num_members:8d} {cost.time_s:7.2f} {channels:8d} {used:12d}",
                    flush=True,
                )


def _measure(sizes: list[int], force: bool | None, rank: int, world_size: int) -> Cost:
    """Start one rank of a fake world; ``force`` None means without the plugin."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    if force is not None:
        vtp_plugin.apply(vtp_size_list=sizes, device="auto", force=force)
    from megatron.core import parallel_state

    calls: list[list[int]] = []
    try:
        with _counted(calls):
            begin_s = time.perf_counter()
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=sizes[0] if force is None else 1,
                pipeline_model_parallel_size=len(sizes),
                create_gloo_process_groups=False,
            )
            time_s = time.perf_counter() - begin_s
    finally:
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()
        dist.destroy_process_group()
    own = [ranks for ranks in calls if rank in ranks]
    return Cost(len(calls), len(own), sum(len(ranks) for ranks in own), time_s)


@contextmanager
def _counted(calls: list[list[int]]) -> Iterator[None]:
    """Note the ranks of every group that is made."""
    original = dist.new_group

    def new_group(ranks: list[int] | None = None, **options: object) -> object:
        calls.append(list(ranks or []))
        return original(ranks, **options)  # pyright: ignore[reportArgumentType]

    dist.new_group = new_group  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = original


def _channels(sizes: list[int], rank: int, world_size: int) -> tuple[int, int]:
    """Count this rank's pipeline channels, and those on which it sends or receives itself."""
    layout = PipelineLayout.from_sizes(sizes, world_size=world_size)
    specs = [
        spec
        for boundary in pipeline_boundaries(layout, is_ring=False)
        for spec in map(boundary.channel, Direction)
        if rank in spec.members
    ]
    return len(specs), sum(rank in spec.participants for spec in specs)


if __name__ == "__main__":
    main()
