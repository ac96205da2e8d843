"""Pages of ``plan`` and ``simulate``: what each of them knows, by section."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace

from vtp_plugin.cli.boundaries import BoundaryView, explain, view_boundaries
from vtp_plugin.cli.bridges import BridgeView, Module, bridge_picture
from vtp_plugin.cli.memory_lines import peaks_by_stage
from vtp_plugin.cli.page_sections import (
    CROSSING_HEADER,
    crossing_cells,
    memory_section,
    page_crossings,
    page_nodes,
    quoted,
    split_parts,
    stage_table,
)
from vtp_plugin.cli.run_flags import Run
from vtp_plugin.cli.terminal import TextTable
from vtp_plugin.config.resolve import option_context
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.plan.launch.node_ranks import named_nodes, usual_nodes
from vtp_plugin.plan.schedule.cost.simulator import Timeline
from vtp_plugin.plan.schedule.order.schedule import Schedule
from vtp_plugin.plan.schedule.proof.check_schedule import peaks_kept
from vtp_plugin.report.page.report_page import Crossing, PageTable, ReportPage
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.draw_timeline import draw_svg


def page_of_plan(
    options: argparse.Namespace,
    flags: Run,
    views: Sequence[BoundaryView],
    lines: Sequence[str],
    launch: Launch,
    note: str,
) -> ReportPage:
    """Show a layout: nodes, what crosses, memory, commands.

    Args:
        options: parsed arguments.
        flags: the run.
        views: its boundaries.
        lines: what is to be said at the beginning.
        launch: what to start.
        note: what is to be said of that.
    """
    return ReportPage(
        command="plan",
        title=option_context(flags.config, flags.layout).size_list,
        argv=quoted(options.argv),
        notes=tuple(lines),
        nodes=page_nodes(launch.nodes, flags.layout, flags.sites, launch),
        about_nodes=(*launch.warnings(), *note.splitlines()),
        stages=stage_table(flags.layout, flags.sites),
        picture=_pipeline(flags),
        crossing_header=CROSSING_HEADER,
        crossings=page_crossings(views),
        memory=memory_section(flags, options.card_memory, peaks_by_stage(flags)),
        script="\n".join(launch.slurm_lines()) if options.slurm else "",
    )


def page_of_bridges(
    options: argparse.Namespace, modules: tuple[Module, ...], views: tuple[BridgeView, ...]
) -> ReportPage:
    """Show modules on grids of their own, and the bridges between them."""
    rows = [(one.name, *map(str, one.sizes), f"{one.ranks.start}-{one.ranks.stop - 1}") for one in modules]
    crossings = [
        Crossing(
            name=f"{view.source.name} -> {view.destination.name}",
            cells=crossing_cells(view),
            lines=tuple(explain(view)),
        )
        for view in views
    ]
    return ReportPage(
        command="plan",
        title=f"{' and '.join(view.source.name for view in views)} -> {modules[-1].name}",
        argv=quoted(options.argv),
        table=PageTable(header=("module", "tp", "cp", "pp", "dp", "ranks"), rows=rows),
        about_table="Modules",
        picture=bridge_picture(modules, views),
        crossing_header=("bridge", "messages", "for each microbatch"),
        crossings=tuple(crossings),
    )


def page_of_simulation(
    options: argparse.Namespace,
    flags: Run | None,
    schedule: Schedule,
    timeline: Timeline,
    parts: Iterable[str | TextTable],
    *,
    title: str,
    unit: str,
) -> ReportPage:
    """Show a simulated step, and the layout that runs it.

    Args:
        options: parsed arguments.
        flags: the run; None for modules.
        schedule: the order of the step.
        timeline: the step.
        parts: what the command prints.
        title: heading of the step.
        unit: unit of its times.
    """
    table, notes = split_parts(parts)
    page = ReportPage(
        command="simulate",
        title=title,
        argv=quoted(options.argv),
        notes=notes,
        table=table,
        about_table="Stages in a step",
        step=draw_svg(timeline, title=title, unit=unit),
        about_step="A simulated step",
    )
    if flags is None:
        return page
    fitted, layout = flags.fitted, flags.layout
    nodes = named_nodes(fitted.candidate.node_names, layout) if fitted else usual_nodes(layout, flags.sites)
    assumed = "the nodes are assumed; plan --nodes 8,6 takes their devices, and says what to start on each"
    peaks = [peaks_kept(schedule, stage) for stage in range(layout.num_stages)]
    return replace(
        page,
        nodes=page_nodes(nodes, layout, flags.sites),
        about_nodes=() if fitted else (assumed,),
        stages=stage_table(layout, flags.sites),
        picture=_pipeline(flags),
        crossing_header=CROSSING_HEADER,
        crossings=page_crossings(view_boundaries(flags)),
        memory=memory_section(flags, options.card_memory, peaks),
    )


def _pipeline(flags: Run) -> str:
    return draw_pipeline(
        flags.layout,
        is_ring=flags.is_ring,
        rules=flags.rules,
        dp_mode=flags.replicas.mode,
        num_rings=flags.config.num_rings,
    )
