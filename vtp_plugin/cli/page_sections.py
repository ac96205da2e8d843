"""What commands show of a run as tables and as a page: memory, what crosses, pictures; and how a page is written."""

from __future__ import annotations

import argparse
import base64
import hashlib
import math
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.resources import files
from itertools import groupby, islice
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.cli.boundaries import Views, crossing_cells, explain, format_bytes, pattern_of
from vtp_plugin.cli.command_base import write_file
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.cli.search_request import CARD_MEMORY
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.layout.pipeline_layout import format_ranks
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.cost.costs import u_costs
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.make.u_shape import choose_limits
from vtp_plugin.plan.schedule.order.placement import num_rings
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept
from vtp_plugin.report import page as template
from vtp_plugin.report.page.report_page import MemoryBar, MemorySection, ReportPage, TextTable
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.util.text import own_command

if TYPE_CHECKING:
    from markupsafe import Markup


Peaks = tuple[Kept, ...]
"""The fullest moments of a rank of a stage: what it keeps of each of its chunks."""
_PIECES = ("weights", "gradients", "optimizer", "overhead", "activations", "waiting for gradients of weights")
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
    header = ("memory of a rank", "parameters", *_PIECES[:-1], *(("waiting",) if is_split else ()), *of_a_step)
    yield from TextTable.aligned(header, [*_rows(flags, flags.memory, peaks)], right=range(1, len(header))).lines
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
    is_split, memory = flags.schedule_options.split_backward, flags.memory
    if isinstance(memory, str) or any(
        held.activation_bytes is None or (is_split and held.waiting_bytes is None) for held in memory
    ):
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
        row = [f"stage {format_ranks(alike)}", f"{held.num_parameters:,}", *map(format_bytes, _always(held))]
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


# A picture that is longer is packed, and the browser unpacks it: 64 stages with 64 microbatches are 1.7 MB.
_MOST_CHARACTERS = 200_000


def write_output(options: argparse.Namespace, by_ending: Mapping[str, Callable[[], str | ReportPage]]) -> None:
    """Write the file of ``--output``, if one was asked for.

    Args:
        options: parsed arguments.
        by_ending: makes what the file holds, by the ending of its name.

    Raises:
        ConfigError: it cannot be written.
    """
    if options.output is not None:
        made = by_ending[options.output.suffix]()
        write_file(options.output, made if isinstance(made, str) else render(made, options.argv))


def render(page: ReportPage, argv: Sequence[str]) -> str:
    """Fill the template; every text is escaped but the pictures, which are markup of `vtp_plugin.report.pictures`.

    Args:
        page: the page.
        argv: words of the command that writes it.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files(template)
    html, style, script = ((folder / f"page.{ending}").read_text(encoding="ascii") for ending in ("html", "css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = format_bytes
    environment.filters["picture"] = _picture
    # The browser runs this script and no other, whatever a name holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = environment.from_string(html).render(
        page=page,
        about_nodes=(*(page.launch.warnings() if page.launch and page.launch.program else ()), *page.about_nodes),
        command=argv[0],
        line=f"{own_command()} {shlex.join(argv)}",
        style=Markup(style),
        script=Markup(script),
        digest=digest,
        version=vtp_plugin.__version__,
    )
    return text.encode("ascii", "xmlcharrefreplace").decode()  # names of users may have any letters


def _picture(svg: str) -> Markup:
    """Give a picture as markup; a long one as text that the page's script unpacks."""
    from markupsafe import Markup

    if len(svg) <= _MOST_CHARACTERS:
        return Markup(svg)
    packed = base64.b64encode(zlib.compress(svg.encode(), 9)).decode()
    return Markup(f'<template class="packed">{packed}</template><noscript>This picture needs JavaScript.</noscript>')


def split_parts(parts: Iterable[str | TextTable]) -> tuple[TextTable | None, Sequence[str]]:
    """Take apart what a command prints: its table, and its lines."""
    found = [*parts]
    tables = [part for part in found if isinstance(part, TextTable)]
    return (tables or [None])[-1], [part for part in found if isinstance(part, str) and part]


def with_run(page: ReportPage, flags: Run, views: Views, limit_bytes: int | None, peaks: Sequence[Peaks]) -> ReportPage:
    """Show on a page what is known of a run: its sites, what crosses, and memory.

    Args:
        page: the page, with what else it shows.
        flags: the run.
        views: its boundaries.
        limit_bytes: memory of a device; None where it is not known.
        peaks: what a rank of each stage keeps at its fullest moments; empty where that is not known.
    """
    return replace(
        page,
        sites=flags.sites,
        picture=picture_of(flags),
        crossing_header=("boundary", "how", "messages", "for each microbatch", "why"),
        crossings=[*_crossings(views)],
        memory=_memory_section(flags, limit_bytes, peaks),
    )


def picture_of(flags: Run) -> str:
    """Draw the pipeline of a run."""
    return draw_pipeline(
        flags.layout,
        is_ring=flags.is_ring,
        rules=flags.rules,
        dp_mode=flags.replicas.mode,
        num_rings=flags.config.num_rings,
    )


def _crossings(views: Views) -> Iterator[tuple[Sequence[str], Sequence[str]]]:
    """Explain the boundaries; neighbouring boundaries that are crossed alike are one."""
    for _, group in groupby(views.items(), key=lambda item: pattern_of(*item)):
        (boundary, view), *rest = group
        name = f"{view.name} to {rest[-1][1].name} ({len(rest) + 1} alike)" if rest else view.name
        yield (name, boundary.strategy, *crossing_cells(view), boundary.reason), [*explain(view)]


def _memory_section(flags: Run, limit_bytes: int | None, peaks: Sequence[Peaks]) -> MemorySection | None:
    """Draw what every rank holds; None where it is not known.

    Args:
        flags: the run.
        limit_bytes: memory of a device; None where it is not known.
        peaks: what a rank of each stage keeps at its fullest moments; empty where that is not known.
    """
    if isinstance(flags.memory, str):
        return None
    notes = [f"activations: {flags.about_activations}"]
    number = "as many microbatches as a stage has in flight when it holds the most" if peaks else "one microbatch"
    notes.append(f"drawn are those of {number}")
    if limit_bytes is None:
        notes.append(f"{CARD_MEMORY} 80GiB or the like draws the memory of a device beside them")
    bars: list[MemoryBar] = []
    for stage in range(flags.layout.num_stages):
        alike: dict[tuple[int, ...], list[int]] = {}
        for rank in flags.layout.stage_ranks(stage):
            held = flags.memory[rank]
            kept = held.fullest(peaks[stage]) if peaks else ((1, 0),) * len(held.chunks)
            alike.setdefault((*_always(held), *held.kept_parts(kept)), []).append(rank)
        for sizes, ranks in alike.items():
            label = f"stage {stage}, rank{'s'[: len(ranks) > 1]} {format_ranks(ranks)}"
            bars.append(MemoryBar(label=label, pieces=tuple(zip(_PIECES, sizes, strict=True)), limit_bytes=limit_bytes))
    return MemorySection(bars=tuple(bars), notes=tuple(notes))


def _always(held: Footprint) -> tuple[int, ...]:
    """Give what a rank holds all the time, as in `_PIECES`."""
    return held.weight_bytes, held.gradient_bytes, held.optimizer_bytes, held.overhead_bytes
