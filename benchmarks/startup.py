"""What start-up costs a rank: planning, process groups, memberships and time, on one CPU.

    python -m benchmarks.startup

The first table is planning alone, which needs no process group: layout, rank lists of all groups, boundaries, channels
and their proofs. Time is the median of several runs, in seconds of this process's CPU; memory is the peak of what
Python allocates. The second table is a whole start-up.

The world is torch's fake process group: nothing is sent, but Megatron's own ``initialize_model_parallel`` runs and
every ``new_group`` call is made. Each row is one rank: the first of the first stage (leader), the last of the world.
Compared are stock Megatron with one size, the plugin with the same uniform list forced on, and a list with a narrow
first stage. What a membership costs: on gloo, at creation, 3 threads and 3 + W descriptors for W members; on NCCL and
HCCL nothing before the first message, then a communicator (HCCL: 2 x its buffer size, by default 2 x 200 MB, for a pair
2 x 20 MB). The last columns count the pipeline channels, and those on which the rank itself sends or receives.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import tracemalloc

from benchmarks.startup_world import STARTS, start
from vtp_plugin.plan.boundary.channel_spec import _prototype, distinct_plans, pipeline_boundaries, tied_weight_specs
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.message_kind import HeaderCodec
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout
from vtp_plugin.plan.layout.stage_grid import rank_generators

_NUM_RUNS = 5
_MESSAGE_BYTES = 16 << 20
# What initialize_model_parallel asks for.
_DENSE_TOKENS = "gtp_remat dp-cp dp cp tp-gtp_remat-pp tp pp tp-gtp_remat-dp-cp tp-gtp_remat-dp tp-cp"
_EXPERT_TOKENS = "gtp_remat ep tp tp-ep tp-ep-pp tp-ep-gtp_remat-pp dp"
# Sizes per stage: tensor-parallel, context-parallel, data-parallel for one replica of the largest world that fits.
_PLANNED = {
    "1 + 7 x 9": ([1, *[9] * 7], [1] * 8, [1] * 8),
    "8,16,16,8": ([8, 16, 16, 8], [1] * 4, [1] * 4),
    "4,8,8,4, cp 2,1,1,2": ([4, 8, 8, 4], [2, 1, 1, 2], [1] * 4),
    "8,16,16,8, dp x 2,1,1,2": ([8, 16, 16, 8], [1] * 4, [2, 1, 1, 2]),
}


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[64, 512, 4096], help="of the second table")
    parser.add_argument("--planned-sizes", type=int, nargs="+", default=[64, 512, 4096, 32768], help="of the first one")
    options = parser.parse_args()
    import megatron.core.parallel_state  # noqa: F401  not part of what is measured

    print(f"{'ranks':>5} {'layout':28} {'channels':>8} {'planning s':>10} {'peak MiB':>8}")
    for world_size in options.planned_sizes:
        for name, sizes in _PLANNED.items():
            layout = _largest_layout(*sizes, world_size)
            time_s = statistics.median(_time_planning(layout) for _ in range(_NUM_RUNS))
            num_channels, peak_mib = _weigh_planning(layout)
            print(f"{layout.world_size:5d} {name:28} {num_channels:8d} {time_s:10.3f} {peak_mib:8.1f}", flush=True)
    print()
    print(
        f"{'ranks':>5} {'layout':28} {'rank':>5} {'new_group calls':>15} {'member of':>9} {'members':>8} {'time s':>7} "
        f"{'channels':>8} {'of them used':>12}"
    )
    for world_size in options.world_sizes:
        for name, (sizes, force) in STARTS.items():
            for rank in (0, world_size - 1):
                cost = start(sizes, force, rank, world_size)
                channels, used = (0, 0) if force is None else _channels(sizes, rank, world_size)
                print(
                    f"{world_size:5d} {name:28} {rank:5d} {cost.num_calls:15d} {cost.num_memberships:9d} "
                    f"{cost.num_members:8d} {cost.time_s:7.2f} {channels:8d} {used:12d}",
                    flush=True,
                )


def _largest_layout(tp: list[int], cp: list[int], dp: list[int], world_size: int) -> PipelineLayout:
    """Repeat replicas as often as they fit, once at least."""
    size = sum(a * b * c for a, b, c in zip(tp, cp, dp, strict=True))
    num_copies = max(1, world_size // size)
    return PipelineLayout.from_sizes(tp, world_size=size * num_copies, cp=cp, dp=[c * num_copies for c in dp])


def _plan(layout: PipelineLayout) -> int:
    """Plan what rank 0 needs before its first group; return the number of channels that are opened."""
    _prototype.cache_clear()
    layout = PipelineLayout(layout.stages)
    dense, expert = rank_generators(layout)
    for generator, tokens in ((dense, _DENSE_TOKENS), (expert, _EXPERT_TOKENS)):
        for token in tokens.split():
            generator.get_ranks(token)
    del dense, expert
    boundaries = pipeline_boundaries(layout, is_ring=False, rules=TransportRules(tensor_bytes=_MESSAGE_BYTES))
    specs = [boundary.channel(direction) for boundary in boundaries for direction in Direction]
    specs += tied_weight_specs(layout)
    for plan in distinct_plans(specs):
        require_valid(plan)
    for spec in specs:
        _ = spec.participants, spec.largest_message_bytes, spec.gathering_groups
        if 0 in spec.members:
            spec.plan_header(HeaderCodec().length)
    return len(specs)


def _time_planning(layout: PipelineLayout) -> float:
    gc.collect()
    begin_s = time.process_time()
    _plan(layout)
    return time.process_time() - begin_s


def _weigh_planning(layout: PipelineLayout) -> tuple[int, float]:
    tracemalloc.start()
    num_channels = _plan(layout)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return num_channels, peak_bytes / 2**20


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
