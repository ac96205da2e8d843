"""What every rank holds, as lines of ``plan`` and as JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.plan.layout.chunks import Kept
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.cost.costs import u_costs
from vtp_plugin.plan.schedule.make.limits import choose_limits
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import num_rings
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept

Peaks = tuple[Kept, ...]
"""The fullest moments of a rank of a stage: what it keeps of each of its chunks."""
_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "overhead", "activations")
_ABOUT_WAITING = "of one microbatch, from the gradient of its input to those of its weights"
_NOT_WAITING = "not known but of Megatron's own layers (--transformer-impl local) without --moe-grouped-gemm"
_ABOUT_CHUNKS = (
    "several numbers: of a stage's chunks, in the order of the model; chunks that keep as much are counted together"
)


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
    if peaks and flags.is_ring:
        yield _ABOUT_CHUNKS
    most = max(flags.memory, key=lambda held: held.activation_bytes or 0)
    if most.kept_bytes:
        named = (f"{name} {format_bytes(size)}" for name, size in islice(most.kept_bytes.items(), 3))
        yield f"the most of it, on the fullest rank: {', '.join(named)}"
    if most.overhead_bytes:
        yield "overhead: estimated; buffers of communicators, workspaces, 8-bit weights and the allocator's blocks"


def peaks_by_stage(flags: Run) -> tuple[Peaks, ...]:
    """Give what a rank of every stage keeps at its fullest moments; empty where the bytes are not known."""
    is_split = flags.schedule_options.split_backward
    if isinstance(flags.memory, str) or any(held.activation_bytes is None for held in flags.memory):
        return ()
    if is_split and any(held.waiting_bytes is None for held in flags.memory):
        return ()
    request = ScheduleRequest(
        placement=flags.placement,
        num_microbatches=_num_microbatches(flags),
        costs=flags.schedule_options.costs,
        in_flight=flags.schedule_options.in_flight,
        split_backward=is_split,
    )
    schedule, _ = make_schedule(request)
    return tuple(peaks_kept(schedule, stage) for stage in range(flags.placement.num_stages))


def _num_microbatches(flags: Run) -> int:
    """Give the microbatches of a step, or fewer where these show the most that a stage keeps."""
    placement, options, given = flags.placement, flags.schedule_options, flags.num_microbatches
    rings, limits = num_rings(placement), options.in_flight or (0,)
    if given is not None and (rings or options.split_backward):
        # There it depends on the whole order.
        return given
    if rings:
        costs = options.costs or u_costs(placement.num_stages, num_rings=rings)
        limits, _ = choose_limits(options.in_flight, placement, costs, sys.maxsize)
    enough = math.lcm(*placement.num_replicas) * (placement.num_stages + max(limits))
    if flags.is_ring and not rings:
        # Interleaved microbatches go in groups of as many as there are stages; the third group is like all later ones.
        enough = 3 * placement.num_stages
    return enough if given is None else min(given, enough)


def _rows(flags: Run, memory: Sequence[Footprint], peaks: Sequence[Peaks]) -> Iterator[tuple[str, ...]]:
    stages, is_split = range(flags.layout.num_stages), flags.schedule_options.split_backward
    # The ranks of a stage differ in their share of the optimizer only.
    own = ([memory[rank] for rank in flags.layout.stage_ranks(stage)] for stage in stages)
    fullest = [max(ranks, key=lambda held: held.optimizer_bytes) for ranks in own]
    for (held, moments), alike in groupby(stages, key=lambda stage: (fullest[stage], peaks[stage] if peaks else None)):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes)
        row = [f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes)]
        kept = held.fullest(moments) if moments else ((0, 0),) * len(held.chunks)
        kinds: dict[tuple[str, ...], list[int]] = {}
        for chunk, (in_flight, waiting) in zip(held.chunks, kept, strict=True):
            number = kinds.setdefault(tuple("-" if size is None else format_bytes(size) for size in chunk), [0, 0])
            number[0] += in_flight
            number[1] += waiting
        columns = [[one for one, _ in kinds], *([[one for _, one in kinds]] if is_split else [])]
        if moments:
            columns.append([" + ".join(map(str, number[: 1 + is_split])) for number in kinds.values()])
        row += [", ".join(column) or "-" for column in columns]
        yield (*row, *([format_bytes(held.held_bytes(kept))] if moments else []))


def memory_as_json(flags: Run) -> list[dict[str, object]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    peaks, rows = peaks_by_stage(flags), list[dict[str, object]]()
    for rank, held in enumerate(flags.memory):
        kept = held.fullest(peaks[flags.layout.coord(rank).stage]) if peaks else None
        chunks = [
            {"in_flight": pair and pair[0], "num_waiting": pair and pair[1], **chunk._asdict()}
            for chunk, pair in zip(held.chunks, kept or (None,) * len(held.chunks), strict=True)
        ]
        of_all = {
            "in_flight": kept and sum(activations for activations, _ in kept),
            "num_waiting": kept and sum(waiting for _, waiting in kept),
            "total_bytes": kept and held.held_bytes(kept),
            "activation_bytes": held.activation_bytes,
            "waiting_bytes": held.waiting_bytes,
        }
        rows.append({"rank": rank, **asdict(held), **of_all, "chunks": chunks})
    return rows
