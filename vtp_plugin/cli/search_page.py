"""The page of ``search``: the layouts that it found beside stock Megatron, and the advised one in detail."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace

from vtp_plugin.cli.page_sections import page_nodes, quoted, split_parts, stage_table
from vtp_plugin.cli.search_picture import draw_found
from vtp_plugin.cli.search_request import SearchRequest
from vtp_plugin.cli.terminal import TextTable
from vtp_plugin.config.parse_values import format_value
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.plan.launch.launch_commands import Launch
from vtp_plugin.plan.layout.describe import format_ranks
from vtp_plugin.plan.schedule.order.placement import num_rings
from vtp_plugin.report.page.report_page import MemoryBar, MemorySection, ReportPage
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import SearchResult


def page_of_search(
    options: argparse.Namespace,
    request: SearchRequest,
    result: SearchResult,
    advised: Candidate,
    parts: Iterable[str | TextTable],
    launch: Launch,
) -> ReportPage:
    """Show what was found.

    Args:
        options: parsed arguments.
        request: the request.
        result: the layouts.
        advised: the layout to start.
        parts: what the command prints.
        launch: what to start.
    """
    table, notes = split_parts(parts)
    is_stock = advised is result.stock
    sites = advised.sites if any(advised.sites) else ()
    rules = TransportRules() if is_stock else replace(request.problem.rules, transport=advised.transport, sites=sites)
    rings = num_rings(advised.placement)
    return ReportPage(
        command="search",
        title=f"{'stock: ' if is_stock else ''}--vtp-size-list {format_value(advised.sizes)}",
        argv=quoted(options.argv),
        notes=notes,
        table=table,
        about_table="Layouts that were found",
        step=draw_found(result),
        about_step="A simulated step of the best layout, above the best of stock Megatron",
        nodes=page_nodes(launch.nodes, launch.layout, sites, launch),
        about_nodes=tuple(launch.warnings()),
        stages=stage_table(launch.layout, sites),
        picture=draw_pipeline(
            launch.layout,
            is_ring=not rings and advised.num_chunks > 1,
            rules=rules,
            num_rings=rings,
        ),
        memory=MemorySection(bars=tuple(_bars(advised, launch)), notes=(request.about_memory,)),
        script="\n".join(launch.slurm_lines()) if options.slurm else "",
    )


def _bars(candidate: Candidate, launch: Launch) -> Iterator[MemoryBar]:
    """Yield the fullest rank of every stage, beside the smallest of its devices."""
    pools = candidate.split.pools
    for stage, (held, stage_type) in enumerate(zip(candidate.held_bytes, candidate.stage_types, strict=True)):
        known = [pools[pool].memory_bytes for pool in stage_type.pools]
        limits = [limit for limit in known if limit is not None]
        ranks = format_ranks(launch.layout.stage_ranks(stage))
        yield MemoryBar(
            label=f"stage {stage}, ranks {ranks}",
            pieces=(("held by the fullest rank", held),),
            limit_bytes=min(limits, default=None),
        )
