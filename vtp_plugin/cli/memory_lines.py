"""What every rank holds, as lines of ``plan`` and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, islice

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.memory.footprint import Footprint

_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "overhead", "activations")


def memory_lines(flags: Run) -> Iterator[str]:
    """Write a table of the fullest rank of every stage; neighbours that hold as much are one line."""
    if isinstance(flags.memory, str):
        yield f"memory of a rank: {flags.memory}"
        return
    rows = [_HEADS, *_rows(flags, flags.memory)]
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


def _rows(flags: Run, memory: Sequence[Footprint]) -> Iterator[tuple[str, ...]]:
    stages = range(flags.layout.num_stages)
    # The ranks of a stage differ in their share of the optimizer only.
    own = ([memory[rank] for rank in flags.layout.stage_ranks(stage)] for stage in stages)
    fullest = [max(ranks, key=lambda held: held.optimizer_bytes) for ranks in own]
    for held, alike in groupby(stages, key=lambda stage: fullest[stage]):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes)
        kept = "-" if held.activation_bytes is None else format_bytes(held.activation_bytes)
        yield (f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes), kept)


def memory_as_json(flags: Run) -> list[dict[str, object]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    return [{"rank": rank, **asdict(held)} for rank, held in enumerate(flags.memory)]
