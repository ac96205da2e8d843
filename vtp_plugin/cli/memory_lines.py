"""What every rank holds, as lines of ``plan`` and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.fit_flags import CARD_MEMORY
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept

Peaks = tuple[tuple[int, int], ...]
"""Numbers of microbatches in flight, and of those that wait, at the same time."""
_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "overhead", "activations")


_ABOUT_WAITING = "of one microbatch, from the gradient of its input to those of its weights"
_NOT_WAITING = "not known but of Megatron's own layers (--transformer-impl local) without --moe-grouped-gemm"


def memory_lines(flags: Run) -> Iterator[str]:
    """Write a table of the fullest rank of every stage; neighbours that hold as much are one line."""
    if isinstance(flags.memory, str):
        yield f"memory of a rank: {flags.memory}"
        return
    peaks, is_split = peaks_by_stage(flags), flags.schedule_options.split_backward
    of_a_step = ("in flight + waiting" if is_split else "in flight", "total") if peaks else ()
    rows = [(*_HEADS, *(("waiting",) if is_split else ()), *of_a_step), *_rows(flags, flags.memory, peaks)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])
    yield f"activations: {flags.about_activations}"
    if is_split:
        is_known = all(held.waiting_bytes is not None for held in flags.memory)
        yield f"waiting: {_ABOUT_WAITING if is_known else _NOT_WAITING}"
    most = max(flags.memory, key=lambda held: held.activation_bytes or 0)
    if most.kept_bytes:
        named = (f"{name} {format_bytes(size)}" for name, size in islice(most.kept_bytes.items(), 3))
        yield f"the most of it, on the fullest rank: {', '.join(named)}"
    if most.overhead_bytes:
        yield "overhead: estimated; buffers of communicators, workspaces, 8-bit weights and the allocator's blocks"


def peaks_by_stage(flags: Run) -> tuple[Peaks, ...]:
    """Give the most activations, and microbatches whose weights' gradients are missing, that a rank of a stage keeps.

    Empty where one of these is not known, or where a stage keeps several kinds of them: with several chunks on a stage,
    or microbatches that narrow stages join.
    """
    is_split = flags.schedule_options.split_backward
    if isinstance(flags.memory, str) or any(held.activation_bytes is None for held in flags.memory):
        return ()
    if (
        flags.is_ring
        or flags.replicas.is_split
        or (is_split and any(held.waiting_bytes is None for held in flags.memory))
    ):
        return ()
    placement, limits = flags.placement, flags.schedule_options.in_flight
    # With more microbatches no stage has more in flight. How many wait depends on the whole order.
    enough = math.lcm(*placement.num_replicas) * (placement.num_stages + max(limits or (0,)))
    number = flags.num_microbatches or enough
    request = ScheduleRequest(
        placement=placement,
        num_microbatches=number if is_split else min(number, enough),
        costs=flags.schedule_options.costs,
        in_flight=limits,
        split_backward=is_split,
    )
    schedule, _ = make_schedule(request)
    return tuple(peaks_kept(schedule, stage) for stage in range(placement.num_stages))


def check_card_memory(flags: Run, limit_bytes: int | None) -> None:
    """Refuse a fitted layout that takes too much with split backwards.

    The fit counts what waits as one more activation; where layers are computed again, it is more.

    Args:
        flags: the run.
        limit_bytes: memory of a device; None where it is not known.

    Raises:
        ConfigError: a rank would hold more.
    """
    is_split = flags.schedule_options.split_backward
    if flags.fitted is None or limit_bytes is None or not is_split or isinstance(flags.memory, str):
        return
    for stage, peaks in enumerate(peaks_by_stage(flags)):
        ranks = [flags.memory[rank] for rank in flags.layout.stage_ranks(stage)]
        size = max(held.held_bytes(*held.fullest(peaks)) for held in ranks)
        if size > limit_bytes:
            raise ConfigError(
                f"{CARD_MEMORY} {format_bytes(limit_bytes)}: with split backwards stage {stage} holds "
                f"{format_bytes(size)}; the fit counts what waits as activations; leave --vtp-split-backward out"
            )


def _rows(flags: Run, memory: Sequence[Footprint], peaks: Sequence[Peaks]) -> Iterator[tuple[str, ...]]:
    stages, is_split = range(flags.layout.num_stages), flags.schedule_options.split_backward
    # The ranks of a stage differ in their share of the optimizer only.
    own = ([memory[rank] for rank in flags.layout.stage_ranks(stage)] for stage in stages)
    fullest = [max(ranks, key=lambda held: held.optimizer_bytes) for ranks in own]
    for (held, kept), alike in groupby(stages, key=lambda stage: (fullest[stage], peaks[stage] if peaks else None)):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes)
        of_one = (held.activation_bytes, *((held.waiting_bytes,) if is_split else ()))
        row = [f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes)]
        row += ["-" if size is None else format_bytes(size) for size in of_one]
        if kept is not None:
            in_flight, waiting = held.fullest(kept)
            row += [f"{in_flight} + {waiting}" if is_split else str(in_flight)]
            row += [format_bytes(held.held_bytes(in_flight, waiting))]
        yield tuple(row)


def memory_as_json(flags: Run) -> list[dict[str, object]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    peaks, rows = peaks_by_stage(flags), list[dict[str, object]]()
    for rank, held in enumerate(flags.memory):
        in_flight, waiting = held.fullest(peaks[flags.layout.coord(rank).stage]) if peaks else (None, None)
        rows.append({"rank": rank, "in_flight": in_flight, "num_waiting": waiting, **asdict(held)})
    return rows
