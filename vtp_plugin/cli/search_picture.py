"""The simulated step of the best layout that was found, above that of the best one of stock Megatron."""

from __future__ import annotations

from collections.abc import Iterator

from vtp_plugin.cli.search_request import SearchRequest
from vtp_plugin.config.parse_values import format_value
from vtp_plugin.plan.schedule.cost.simulator import Timeline, timeline_of
from vtp_plugin.plan.schedule.order.actions import Op
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.fastest import Found
from vtp_plugin.tune.search.schedule_time import compiled_for

_COLOURS = {"forward": "#3f6ca8", "backward": "#b4540a", "gradients": "#9a3f73", "optimizer": "#6b4a9b"}
_KINDS = {Op.F: "forward", Op.B: "backward"}
# Once all stages are busy, every further microbatch looks like the one before.
_MOST_MICROBATCHES = 16


def draw_found(asked: SearchRequest, found: Found) -> str:
    """Draw the stages of both layouts over one axis of seconds, as SVG."""
    named = [("best", found.best[0]), *([] if found.stock is None else [("stock", found.stock)])]
    most = max(choice.shape.num_microbatches for _, choice in named)
    title = "One simulated step" if most <= _MOST_MICROBATCHES else f"The first {_MOST_MICROBATCHES} microbatches"
    groups = [Group(name=_name(name, choice), rows=[*_rows(asked, choice)]) for name, choice in named]
    return draw_rows(groups, title=f"{title} of the layouts that search found", unit="s", colours=_COLOURS)


def _name(name: str, choice: Candidate) -> str:
    shape = choice.shape
    return (
        f"{name}: --vtp-size-list {format_value(choice.sizes)}, layers {format_value(choice.layers)}, "
        f"{shape.num_replicas} replicas, {shape.num_microbatches} microbatches, step {choice.step_s:.4g} s"
    )


def _rows(asked: SearchRequest, choice: Candidate) -> Iterator[tuple[str, list[Box]]]:
    number = min(_MOST_MICROBATCHES, choice.shape.num_microbatches)
    order = choice.order
    course = compiled_for(
        choice.placement, choice.costs, number, is_planned=order.is_planned, in_flight=order.in_flight
    )
    timeline = timeline_of(course, choice.costs, mode="rendezvous")
    names = asked.fitted(choice).node_names
    for stage, spans in enumerate(timeline.spans):
        boxes = [
            Box(kind=_KINDS[span.action.op], start=span.start, end=span.end, text=str(span.action.microbatch))
            for span in spans
        ]
        boxes += _tail(timeline, choice) if number == choice.shape.num_microbatches else []
        yield f"stage {stage} on {', '.join(dict.fromkeys(names[stage]))}", boxes


def _tail(timeline: Timeline, choice: Candidate) -> Iterator[Box]:
    """Yield what comes behind the last backward pass of all."""
    start = timeline.makespan
    for kind, length_s in (("gradients", choice.sums_s), ("optimizer", choice.update_s)):
        yield Box(kind=kind, start=start, end=start + length_s)
        start += length_s
