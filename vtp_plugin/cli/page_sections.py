"""Sections of a page: the nodes, what crosses, and the memory of a layout."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from vtp_plugin.cli.boundaries import BoundaryView, PlansView, explain, format_bytes
from vtp_plugin.cli.fit_flags import CARD_MEMORY
from vtp_plugin.cli.memory_lines import Peaks
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.cli.terminal import TextTable
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.plan.launch.node_ranks import NodeRanks
from vtp_plugin.plan.layout.describe import format_ranks, size_names, size_texts
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.report.page.report_page import Crossing, MemoryBar, MemorySection, PageNode, PageTable, RanksOfStage
from vtp_plugin.util.own_command import own_command

CROSSING_HEADER = ("boundary", "how", "messages", "for each microbatch", "why")
"""Columns of the table of what crosses."""


def quoted(argv: Iterable[str]) -> str:
    """Write the command line of this command."""
    return f"{own_command()} {shlex.join(argv)}"


def split_parts(parts: Iterable[str | TextTable]) -> tuple[PageTable | None, tuple[str, ...]]:
    """Take apart what a command prints: its table, and its lines."""
    table, notes = None, list[str]()
    for part in parts:
        if isinstance(part, TextTable):
            table = PageTable(header=part.header, rows=part.rows, marked=part.marked)
        elif part:
            notes.append(part)
    return table, tuple(notes)


def page_nodes(
    nodes: Sequence[NodeRanks], layout: PipelineLayout, sites: Sequence[str], launch: Launch | None = None
) -> tuple[PageNode, ...]:
    """Put stages on nodes.

    Args:
        nodes: the nodes with their ranks.
        layout: the pipeline layout.
        sites: site of every stage; empty where there are none.
        launch: the same nodes with what they start; None where that is not known.
    """
    found = []
    commands = {} if launch is None else dict(launch.commands())
    for node in nodes:
        stages = node.stages(layout)
        ranks = {stage: tuple(rank for rank in node.ranks if layout.stage_of(rank) == stage) for stage in stages}
        found.append(
            PageNode(
                name=node.name,
                site=" and ".join(dict.fromkeys(sites[stage] for stage in stages)) if sites else "",
                stages=tuple(RanksOfStage(stage=stage, ranks=ranks[stage]) for stage in stages),
                command=" &\n".join(commands.get(node, ())),
            )
        )
    return tuple(found)


def stage_table(layout: PipelineLayout, sites: Sequence[str]) -> PageTable:
    """Write a row for each stage; one that has a single stage says nothing that its node does not."""
    header = ["stage", *(["site"] if sites else []), *size_names(layout), "ranks"]
    rows = [
        [str(stage), *([sites[stage]] if sites else []), *size_texts(layout, stage), format_ranks(ranks)]
        for stage, ranks in ((stage, layout.stage_ranks(stage)) for stage in range(layout.num_stages))
    ]
    return PageTable(header=header, rows=rows)


def page_crossings(views: Sequence[BoundaryView]) -> tuple[Crossing, ...]:
    """Explain the boundaries; neighbouring boundaries that are crossed alike are one."""
    found = []
    for _, group in groupby(views, key=lambda view: view.pattern):
        first, *rest = group
        name = f"{first.name} to {rest[-1].name} ({len(rest) + 1} alike)" if rest else first.name
        cells = (str(first.boundary.strategy), *crossing_cells(first), first.reason)
        found.append(Crossing(name=name, cells=cells, lines=tuple(explain(first))))
    return tuple(found)


def crossing_cells(view: PlansView) -> tuple[str, str]:
    """Say how many messages cross forward, and how much they carry together."""
    transfers = view.forward.transfers
    if view.itemsize_bytes is None:
        share = float(sum(map(view.share, transfers)))
        return str(len(transfers)), f"{share:g} tensor{'' if share == 1 else 's'}"
    return str(len(transfers)), format_bytes(sum(view.num_bytes(transfer) or 0 for transfer in transfers))


def memory_section(flags: Run, limit_bytes: int | None, peaks: Sequence[Peaks]) -> MemorySection | None:
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
    return MemorySection(bars=tuple(_bars(flags.layout, flags.memory, limit_bytes, peaks)), notes=tuple(notes))


def _bars(
    layout: PipelineLayout,
    memory: Sequence[Footprint],
    limit_bytes: int | None,
    peaks: Sequence[Peaks],
) -> Iterator[MemoryBar]:
    for stage in range(layout.num_stages):
        alike: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for rank in layout.stage_ranks(stage):
            held = memory[rank]
            activations, waiting = held.kept_parts(
                held.fullest(peaks[stage]) if peaks else ((1, 0),) * len(held.chunks)
            )
            pieces = (
                ("weights", held.weight_bytes),
                ("gradients", held.gradient_bytes),
                ("optimizer", held.optimizer_bytes),
                ("overhead", held.overhead_bytes),
                ("activations", activations),
                ("waiting for gradients of weights", waiting),
            )
            alike.setdefault(pieces, []).append(rank)
        for pieces, ranks in alike.items():
            label = f"stage {stage}, rank{'s'[: len(ranks) > 1]} {format_ranks(ranks)}"
            yield MemoryBar(label=label, pieces=pieces, limit_bytes=limit_bytes)
