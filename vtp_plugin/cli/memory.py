"""What every rank holds, as lines of ``plan`` and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby

from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.flags import Run
from vtp_plugin.footprint.state import Footprint
from vtp_plugin.layout.show import format_ranks

_HEADS = ("memory of a rank", "parameters", "weights", "gradients", "optimizer", "activations")


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


def _rows(flags: Run, memory: Sequence[Footprint]) -> Iterator[tuple[str, ...]]:
    stages = range(flags.layout.num_stages)
    fullest = [max((memory[rank] for rank in flags.layout.stage_ranks(s)), key=_optimizer_bytes) for s in stages]
    for held, alike in groupby(stages, key=lambda stage: fullest[stage]):
        sizes = (held.weight_bytes, held.gradient_bytes, held.optimizer_bytes)
        kept = "-" if held.activation_bytes is None else format_bytes(held.activation_bytes)
        yield (f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, sizes), kept)


def _optimizer_bytes(held: Footprint) -> int:
    """What alone may differ between the ranks of a stage."""
    return held.optimizer_bytes


def memory_as_json(flags: Run) -> list[dict[str, int]] | str:
    """Give what every rank holds, or say why it is not known."""
    if isinstance(flags.memory, str):
        return flags.memory
    return [{"rank": rank, **asdict(held)} for rank, held in enumerate(flags.memory)]
