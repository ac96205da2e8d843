"""Draws the simulated step of the best layout above that of stock Megatron's best layout."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.config.parse_values import format_value
from vtp_plugin.plan.schedule.cost.simulator import Timeline, timeline_of
from vtp_plugin.plan.schedule.order.actions import Op
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.find_best import SearchResult
from vtp_plugin.tune.search.schedule_time import compiled_for

_COLOURS = {
    "forward": "#3f6ca8",
    "backward": "#b4540a",
    "weights": "#6b5a14",
    "gradients": "#9a3f73",
    "optimizer": "#6b4a9b",
}
_KINDS = {Op.F: "forward", Op.B: "backward", Op.I: "backward", Op.W: "weights"}
# Once all stages are busy, every further microbatch looks like the one before.
_MOST_MICROBATCHES = 16


def draw_found(result: SearchResult) -> str:
    """Draw the stages of both layouts over one axis of seconds, as SVG."""
    named = [("best", result.best[0]), *([] if result.stock is None else [("stock", result.stock)])]
    most = max(candidate.split.num_microbatches for _, candidate in named)
    title = "One simulated step" if most <= _MOST_MICROBATCHES else f"The first {_MOST_MICROBATCHES} microbatches"
    groups = [
        Group(name=_name(name, candidate), note=_note(candidate), rows=[*_rows(candidate)]) for name, candidate in named
    ]
    return draw_rows(groups, title=f"{title} of the layouts that search found", unit="s", colours=_COLOURS)


def _name(name: str, candidate: Candidate) -> str:
    return f"{name}: --vtp-size-list {format_value(candidate.sizes)}, layers {format_value(candidate.layers)}"


def _note(candidate: Candidate) -> str:
    split = candidate.split
    return f"{split.num_replicas} replicas, {split.num_microbatches} microbatches, step {candidate.step_s:.4g} s"


def _rows(candidate: Candidate) -> Iterator[tuple[str, list[Box]]]:
    number = min(_MOST_MICROBATCHES, candidate.split.num_microbatches)
    order = candidate.order
    compiled = compiled_for(
        candidate.placement,
        candidate.costs,
        number,
        is_planned=order.is_planned,
        in_flight=order.in_flight,
        is_split=order.is_split,
    )
    timeline = timeline_of(compiled, candidate.costs, mode="rendezvous")
    names = candidate.node_names
    for stage, spans in enumerate(timeline.spans):
        boxes = [
            Box(kind=_KINDS[span.action.op], start=span.start, end=span.end, text=str(span.action.microbatch))
            for span in spans
        ]
        boxes += _tail(timeline, candidate) if number == candidate.split.num_microbatches else []
        yield f"stage {stage} on {', '.join(dict.fromkeys(names[stage]))}", boxes


def _tail(timeline: Timeline, candidate: Candidate) -> Iterator[Box]:
    """Yield the boxes behind the last backward pass: gradients and optimizer."""
    start = timeline.makespan
    for kind, length_s in (("gradients", candidate.sums_s), ("optimizer", candidate.update_s)):
        yield Box(kind=kind, start=start, end=start + length_s)
        start += length_s
