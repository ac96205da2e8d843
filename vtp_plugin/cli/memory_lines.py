"""What every rank holds, as lines of ``plan`` and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.proof.check_schedule import peak_activations

_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "overhead", "activations")
_OF_A_STEP = ("in flight", "total")


def memory_lines(flags: Run) -> Iterator[str]:
    """Write a table of the fullest rank of every stage; neighbours that hold as much are one line."""
    if isinstance(flags.memory, str):
        yield f"memory of a rank: {flags.memory}"
        return
    counts = in_flight_by_stage(flags)
    rows = [_HEADS + _OF_A_STEP if counts else _HEADS, *_rows(flags, flags.memory, counts)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
    yield f"activations: {flags.about_activations}"
    most = max(flags.memory, key=lambda held: held.activation_bytes or 0)
    if most.kept_bytes:
        named = (f"{name} {format_bytes(size)}" for name, size in islice(most.kept_bytes.items(), 3))
        yield f"the most of it, on the fullest rank: {', '.join(named)}"
    if most.overhead_bytes:
        yield "overhead: estimated; buffers of communicators, workspaces, 8-bit weights and the allocator's blocks"


def in_flight_by_stage(flags: Run) -> tuple[int, ...]:
    """Give the most microbatches whose activations a rank of every stage keeps at a time.

    Empty where activations are not known, or where a stage keeps several kinds of them: with several chunks on a stage,
    or microbatches that narrow stages join.
    """
    if isinstance(flags.memory, str) or any(held.activation_bytes is None for held in flags.memory):
        return ()
    if flags.is_ring or flags.replicas.is_split:
        return ()
    placement, limits = flags.placement, flags.schedule_options.in_flight
    # With more microbatches no stage has more in flight.
    enough = math.lcm(*placement.num_replicas) * (placement.num_stages + max(limits or (0,)))
    request = ScheduleRequest(
        placement=placement, num_microbatches=min(flags.num_microbatches or enough, enough), in_flight=limits
    )
    schedule, _ = make_schedule(request)
    return tuple(peak_activations(schedule, stage) for stage in range(placement.num_stages))


def _rows(flags: Run, memory: Sequence[Footprint], counts: Sequence[int]) -> Iterator[tuple[str, ...]]:
    stages = range(flags.layout.num_stages)
    # The ranks of a stage differ in their share of the optimizer only.
    own = ([memory[rank] for rank in flags.layout.stage_ranks(stage)] for stage in stages)
    fullest = [max(ranks, key=lambda held: held.optimizer_bytes) for ranks in own]
    for (held, count), alike in groupby(stages, key=lambda stage: (fullest[stage], counts[stage] if counts else None)):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes)
        kept = "-" if held.activation_bytes is None else format_bytes(held.activation_bytes)
        of_a_step = () if count is None else (str(count), format_bytes(held.held_bytes(count)))
        yield (f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes), kept, *of_a_step)


def memory_as_json(flags: Run) -> list[dict[str, object]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    counts = in_flight_by_stage(flags) or (None,) * flags.layout.num_stages
    stages = (flags.layout.coord(rank).stage for rank in range(flags.layout.world_size))
    return [
        {"rank": rank, "in_flight": counts[stage], **asdict(held)}
        for rank, (stage, held) in enumerate(zip(stages, flags.memory, strict=True))
    ]
