"""In which order a step runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, same
from vtp_plugin.config.parse_values import parse_cost_words, parse_in_flight
from vtp_plugin.errors import LayoutError

ScheduleName = Literal["stock", "planned"]
option = functools.partial(declare, FlagGroup.WHEN)


@dataclass(frozen=True, kw_only=True)
class ScheduleFields:
    """Options about the order of a step."""

    schedule: ScheduleName = option(
        same("schedule"),
        "stock",
        "stock (default) keeps Megatron's pipeline schedules; planned runs the same orders, but posts every receive "
        "before the compute that precedes it, and no compute waits for a send; with --vtp-bridges also the orders of "
        "several modules",
    )
    split_backward: bool = option(
        same("vtp_split_backward"),
        False,
        "with --vtp-schedule planned or a U-shape: compute the gradients of linear layers' weights later than those of "
        "their inputs, where a stage would otherwise wait; where that gains nothing, the order stays as it is. A stage "
        "keeps more for this; --vtp-in-flight limits it",
    )
    in_flight: tuple[int, ...] | None = option(
        same("vtp_in_flight", none=""),
        None,
        "with --vtp-schedule planned (not interleaved) or a U-shape: most microbatches in flight on each stage, or one "
        "number for all. A stage keeps that many activations of each of its chunks. Default of a U-shape: as many as "
        "keep the busiest stage busy, plus two; else as in 1F1B (more of them hide slow links). With several modules: "
        "one number for each stage of all modules, encoders first; more let an encoder run ahead",
        "8,4,4",
        parse=parse_in_flight,
    )
    costs: tuple[str, ...] | None = option(
        same("vtp_costs", none="", separator=" "),
        None,
        "U-shaped pipeline: the durations and links that the order is planned for, such as forward_ms=40,80,40 "
        "latency_ms=20. Default: the first steps measure them, and the run prints them as this flag.",
        "KEY=VALUE",
        nargs="+",
        parse=parse_cost_words,
    )
    replan_share: float = option(
        same("vtp_replan_share"),
        0.25,
        "U-shaped pipeline: without --vtp-costs, measure again and plan a new order, at most three times, if a step is "
        "longer or shorter than planned by more than this share; default 0.25 (a quarter), inf for never",
        "0.25",
        type=float,
    )

    def check_schedule(self) -> None:
        """Reject a share that no step can differ by."""
        if not self.replan_share > 0:
            raise LayoutError(
                f"--vtp-replan-share {self.replan_share} must be positive, such as 0.25 for a quarter, or inf for never"
            )
