"""A whole start-up of one rank in torch's fake world; ``startup.py`` prints its costs.

    python -m benchmarks.startup_world --turns ADDRESS

is what ``commits.py`` starts in two commits, which measure in turn.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import vtp_plugin
from benchmarks.turns import measure_in_turn

STARTS: dict[str, tuple[list[int], bool | None]] = {
    "stock Megatron, 8 x 8": ([8] * 8, None),
    "plugin forced on, 8 x 8": ([8] * 8, True),
    # As many ranks a replica, the first stage narrow.
    "plugin, 1 + 7 x 9": ([1, *[9] * 7], False),
}
"""Sizes of the stages; whether the plugin is forced on, None without it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of start-up for one rank."""

    num_calls: int
    num_memberships: int
    num_members: int
    time_s: float


def start(sizes: list[int], force: bool | None, rank: int, world_size: int) -> Cost:
    """Start one rank of a fake world; ``force`` as in :data:`STARTS`."""
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


def main() -> None:
    """Measure whenever it is this program's turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", required=True, help="address, see turns.py")
    parser.add_argument("--world-size", type=int, default=4096)
    options = parser.parse_args()
    import megatron.core.parallel_state  # noqa: F401  not part of what is measured

    def measure() -> dict[str, float]:
        figures = {}
        for name, (sizes, force) in STARTS.items():
            for rank in () if force is None else (0, options.world_size - 1):
                gc.collect()
                figures[f"{name}, rank {rank}, ms"] = 1e3 * start(sizes, force, rank, options.world_size).time_s
        return figures

    measure()
    measure_in_turn(options.turns, measure)


if __name__ == "__main__":
    main()
