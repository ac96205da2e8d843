"""How many microbatches a stage may have in flight: as asked, or by default."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.microbatch_route import make_route
from vtp_plugin.plan.schedule.cost.step_bounds import in_flight_needed_on
from vtp_plugin.plan.schedule.order.placement import Placement

# Microbatches above the need. With two, a step of 16 microbatches under a latency of 1, 2 and 4 forwards of the edge's
# first part takes at most 1.05, 1.10 and 1.20 times a step without latency; more memory gains next to nothing.
_SLACK = 2


def check_in_flight(in_flight: Sequence[int], num_stages: int) -> None:
    """Refuse limits that do not fit the number of stages.

    Args:
        in_flight: Most microbatches in flight: one number for all stages, or one for each.
        num_stages: Pipeline stages.

    Raises:
        ConfigError: Neither one entry nor one for each stage, or an entry below 1: no microbatch could start.
    """
    shown = ",".join(map(str, in_flight))
    if len(in_flight) not in (1, num_stages):
        raise LayoutError(
            f"--vtp-in-flight {shown} has {len(in_flight)} entries; give one number for all stages, or one for each of "
            f"the {num_stages}"
        )
    if min(in_flight) < 1:
        raise LayoutError(
            f"--vtp-in-flight {shown}: with a limit below 1 no microbatch could ever start; every entry must be at "
            "least 1"
        )


def by_stage(in_flight: tuple[int, ...] | None, num_stages: int) -> tuple[int, ...] | None:
    """Return the requested limit of every stage; see :func:`check_in_flight`.

    >>> by_stage((4,), 3), by_stage((4, 2, 1), 3), by_stage(None, 3)
    ((4, 4, 4), (4, 2, 1), None)
    """
    return in_flight * num_stages if in_flight is not None and len(in_flight) == 1 else in_flight


def too_few_in_flight(asked: Sequence[int], least: Sequence[int]) -> LayoutError:
    """Say that limits stop replicas of a stage which wait for each other inside a compute."""
    shown, needed = (",".join(map(str, limits)) for limits in (asked, least))
    return LayoutError(
        f"--vtp-in-flight {shown}: replicas of a stage wait for each other inside a compute (their experts lie on "
        "several replicas, or the loss function sums over them), so that each of them needs a microbatch at the same "
        f"time; give {needed} or more, or leave it out"
    )


def choose_limits(
    in_flight: Sequence[int] | None, placement: Placement, costs: Costs, num_microbatches: int
) -> tuple[tuple[int, ...], str]:
    """Return the limit of microbatches in flight for each stage, and in a few words where the numbers come from.

    The default on every worker is :func:`~vtp_plugin.plan.schedule.cost.step_bounds.in_flight_needed`, which keeps the
    busiest stage busy, plus two, which even out the start and the end of a step. A worker that serves several replicas
    in turn may need more, and gets two for each of them. No limit is above the number of microbatches.

    Args:
        in_flight: Requested limits, see :func:`check_in_flight`; None for the default.
        placement: Which stage holds which virtual stage.
        costs: Costs of the placement.
        num_microbatches: Microbatches of the step.

    Raises:
        ConfigError: What was asked for does not fit the stages, or is less than replicas that compute jointly need.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> choose_limits(None, u_placement(3), u_costs(3, latency=2.0), 16)
    ((7, 7, 7), 'need 5 + 2')
    >>> choose_limits((9, 4, 4), u_placement(3), u_costs(3), 8)
    ((8, 4, 4), 'as asked')
    """
    num_stages = placement.num_stages
    if in_flight is None:
        route = make_route(placement, costs)
        needs = [in_flight_needed_on(route, stage) for stage in range(num_stages)]
        # A later stage with fewer in flight than stage 0 would slow stage 0 down.
        needs = [max(needs[0], needed) for needed in needs]
        shown = ",".join(map(str, needs if max(needs) > needs[0] else needs[:1]))
        widest = max(placement.num_replicas)
        slacks = [_SLACK * math.ceil(widest / number) for number in placement.num_replicas]
        asked = tuple(needed + slack for needed, slack in zip(needs, slacks, strict=True))
        reason = f"need {shown} + {','.join(map(str, slacks if widest > 1 else slacks[:1]))}"
    else:
        check_in_flight(in_flight, num_stages)
        asked = by_stage(tuple(in_flight), num_stages) or ()
        if any(map(operator.lt, asked, placement.least_in_flight)):
            raise too_few_in_flight(asked, placement.least_in_flight)
        reason = "as asked"
    return tuple(min(limit, num_microbatches) for limit in asked), reason
