"""The order of a run, from its layout and its flags."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.schedule.cost.costs import ROUNDING, Costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import CompiledSchedule, choose_lookahead
from vtp_plugin.plan.schedule.make.split_backward import fill_waits, time_of_whole
from vtp_plugin.plan.schedule.make.u_shape import (
    UOrder,
    choose_limits,
    cut_in_flight,
    interleaved_one_f_one_b,
    one_f_one_b,
    one_f_one_b_limits,
    plain_forward_only,
    plan_u_shape,
)
from vtp_plugin.plan.schedule.order.actions import Op, Schedule
from vtp_plugin.plan.schedule.order.add_communication import lower
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, num_rings
from vtp_plugin.plan.schedule.proof.check_schedule import most_activations, peak_in_flight, peaks_kept, require_valid
from vtp_plugin.util.text import in_digits

_PATIENCES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOrder:
    """The chosen order.

    Attributes:
        schedule: Order of compute; without a split where that is as fast.
        makespan: Its simulated time, or a little more, in the unit of the costs.
        whole_makespan: Time of the fastest order without a split.
    """

    schedule: Schedule
    makespan: float
    whole_makespan: float

    @property
    def is_split(self) -> bool:
        """Whether a split gains anything."""
        return self.makespan < self.whole_makespan

    @property
    def reason(self) -> str:
        """Say in a few words what the split gains.

        >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
        >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
        >>> order = one_f_one_b(4, 8)
        >>> choose_split((order,), uniform_costs(order.placement), (4,) * 4).reason
        'split backwards: step 27, 33 without'
        """
        if not self.is_split:
            return f"split backwards gain nothing: step {in_digits(self.makespan, 6)}"
        return f"split backwards: step {in_digits(self.makespan, 6)}, {in_digits(self.whole_makespan, 6)} without"


def choose_split(bases: Sequence[Schedule], costs: Costs, kept: Sequence[int]) -> SplitOrder:
    """Return the fastest of some orders, with their backwards split and without.

    Ties go to an order without a split, then to the first base.

    Args:
        bases: Orders of compute with whole backwards, for one placement; each keeps the limits.
        costs: Costs of the placement.
        kept: Most microbatches on each worker, see :func:`~vtp_plugin.plan.schedule.make.split_backward.fill_waits`.
    """
    wholes = [(time_of_whole(base, costs), base) for base in bases]
    whole_makespan, best = min(wholes, key=lambda pair: pair[0])
    found = whole_makespan
    walks = [(base, True) for base in bases]
    if bases[0].placement.num_vstages == bases[0].placement.num_stages:
        # Also one that takes what is there first. Only its placement counts, so one base is enough.
        walks.append((bases[0], False))
    for (base, keeps_order), patience in product(walks, _PATIENCES):
        try:
            filled, time = fill_waits(base, costs, kept, patience=patience, keeps_order=keeps_order)
        except PlanError:
            continue
        if time < found * (1 - ROUNDING):
            found, best = time, filled
    return SplitOrder(schedule=best, makespan=found, whole_makespan=whole_makespan)


# How many computes ahead plain pipelines post a receive. One is enough without latency; over a slow link 1F1B is up to
# 14 % slower with one, and forward only takes twice as long. The second costs the memory of one more activation.
_PLAIN_LOOKAHEAD = 2
# Microbatches in flight above what 1F1B needs that are tried where backwards are split, besides the limits themselves;
# more hide slow links.
_MORE_IN_FLIGHT = (0, 1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What determines the schedule of a step; equal requests get equal schedules.

    Attributes:
        placement: Which stage holds which virtual stage: plain, a tree, interleaved or U-shaped.
        num_microbatches: Microbatches of the step.
        forward_only: No backward pass.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`, of interleaved orders only; None for its default.
        costs: Costs of the placement in ms, for the U's order and for split backwards; None for the model U-shape of
            :func:`~vtp_plugin.plan.schedule.cost.costs.u_costs`, or else equal stages, without latency.
        in_flight: Most microbatches in flight. For the U's order: for all stages, or for each; None for the default of
            :func:`~vtp_plugin.plan.schedule.make.u_shape.choose_limits`. For 1F1B for each; None for as few as keep it
            going.
        split_backward: Whether gradients of weights may be computed later than those of inputs.
    """

    placement: Placement
    num_microbatches: int
    forward_only: bool = False
    group_size: int | None = None
    costs: Costs | None = None
    in_flight: tuple[int, ...] | None = None
    split_backward: bool = False


def make_schedule(request: ScheduleRequest) -> tuple[Schedule, str]:
    """Return the lowered schedule of a step, and in one line what was chosen; a function of the request alone.

    Raises:
        ConfigError: The placement is none of the three, or the order does not exist for these counts or limits.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> schedule, reason = make_schedule(ScheduleRequest(placement=plain_placement(2), num_microbatches=1))
    >>> print(schedule.describe())
    stage 0: 0RECV_B0 0F0 0SEND_F0 0WAIT_RECV_B0 0WAIT_SEND_F0 0B0
    stage 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0
    >>> reason == f"schedule {schedule.digest}: 1f1b, microbatches: 1, lookahead: 2"
    True
    """
    schedule, lookahead, reason = _order(request)
    lowered = lower(schedule, lookahead=lookahead)
    require_valid(lowered)
    about = f"{schedule.name}, microbatches: {request.num_microbatches}, lookahead: {lookahead}"
    return lowered, f"schedule {lowered.digest}: {about}{reason}"


def summarise(request: ScheduleRequest, schedule: Schedule) -> str:
    """Say in plain words what was planned; the reason of :func:`make_schedule` has the details.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement, u_placement
    >>> for placement in (plain_placement(2), u_placement(2)):
    ...     request = ScheduleRequest(placement=placement, num_microbatches=8)
    ...     print(summarise(request, make_schedule(request)[0]))
    planned 1F1B of 8 microbatches: up to 2,1 in flight on the stages
    planned a U of 8 microbatches: up to 3 in flight on each stage
    >>> for placement in (plain_placement(2), plain_placement(2, num_replicas=(1, 4), joint=((1, 1), (2, 2)))):
    ...     request = ScheduleRequest(placement=placement, num_microbatches=8, split_backward=True)
    ...     print(summarise(request, make_schedule(request)[0]))
    planned 1F1B of 8 microbatches, backwards split: up to 2,1 in flight on the stages
    planned 1F1B of 8 microbatches, backwards whole, since a split gains nothing: up to 5,1 in flight on the stages
    """
    placement = schedule.placement
    is_interleaved = placement.num_vstages > placement.num_stages
    kind = "a U" if num_rings(placement) else "interleaved 1F1B" if is_interleaved else "1F1B"
    what = f"planned {kind} of {request.num_microbatches} microbatches"
    if request.forward_only:
        return f"{what}, forward only"
    if request.split_backward:
        is_split = any(action.op is Op.I for order in schedule.orders for action in order)
        what += ", backwards split" if is_split else ", backwards whole, since a split gains nothing"
    peaks = [max(most_activations(peaks_kept(schedule, stage))) for stage in range(placement.num_stages)]
    if len(set(peaks)) == 1:
        return f"{what}: up to {peaks[0]} in flight on each stage"
    return f"{what}: up to {','.join(map(str, peaks))} in flight on the stages"


def compile_schedule(request: ScheduleRequest) -> CompiledSchedule:
    """Return the schedule of :func:`make_schedule`, proven and compiled for simulation.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> compiled = compile_schedule(ScheduleRequest(placement=plain_placement(2), num_microbatches=4))
    >>> compiled.activations, len(compiled.messages)
    ((2, 1), 8)
    """
    schedule, lookahead, _ = _order(request)
    return CompiledSchedule(lower(schedule, lookahead=lookahead))


def _order(request: ScheduleRequest) -> tuple[Schedule, int, str]:
    """Return the order of compute, how many computes ahead receives are posted, and why."""
    placement, num_microbatches = request.placement, request.num_microbatches
    num_stages = placement.num_stages
    num_chunks = placement.num_vstages // num_stages
    if request.split_backward and not request.forward_only:
        return _split_order(request)
    if num_rings(placement):
        return _u_order(request)
    if placement.stages != interleaved_placement(num_stages, num_chunks).stages:
        raise ConfigError(f"no order is known for the placement {placement.stages}")
    if num_chunks > 1:
        if placement.num_workers > num_stages:
            raise ConfigError(
                f"{','.join(map(str, placement.num_replicas))} replicas that share the microbatches, with {num_chunks} "
                "chunks on each stage; an interleaved order is that of one replica each; plan one replica, or one chunk"
            )
        schedule = interleaved_one_f_one_b(
            num_stages,
            num_chunks,
            num_microbatches,
            group_size=request.group_size,
            num_frozen=placement.num_frozen,
            forward_only=request.forward_only,
        )
        return schedule, 1, ""
    if request.forward_only:
        schedule = plain_forward_only(placement, num_microbatches)
    else:
        schedule = one_f_one_b(placement, num_microbatches, in_flight=request.in_flight)
    if placement.num_workers == num_stages and placement.is_chain and request.in_flight is None:
        return schedule, _PLAIN_LOOKAHEAD, ""
    # A narrow stage keeps the activations of several replicas, and an encoder may run ahead; the log shows how many,
    # since they cost memory.
    kept = "none kept" if request.forward_only else f"kept activations by stage {_kept(schedule)}"
    several = ",".join(map(str, placement.num_replicas)) if placement.num_workers > num_stages else ""
    # A message may leave only when its receive is posted: running ahead is of use only if the receives do so too, past
    # a forward and a backward for each microbatch.
    lookahead = max(_PLAIN_LOOKAHEAD, 2 * min(max(request.in_flight or (1,)), num_microbatches))
    return schedule, lookahead, (f"; replicas by stage {several}, " if several else "; ") + kept


def _split_order(request: ScheduleRequest) -> tuple[Schedule, int, str]:
    """Choose an order with split backwards, from those that are known without a split."""
    placement = request.placement
    if num_rings(placement):
        costs = _u_costs(request)
        # A good order of forwards and whole backwards, and one of forwards and gradients of inputs alone.
        orders = [_plan_u(request, known) for known in (costs, replace(costs, backward=costs.of_input, weights=()))]
        bases, kept = [order.schedule for order, _ in orders], placement.by_worker(orders[0][1][0])
    else:
        costs = request.costs or uniform_costs(placement)
        limits = request.in_flight
        if limits is None:
            # As many everywhere as the stage that keeps the most has without a split.
            whole = _order(replace(request, split_backward=False))[0]
            most = max(peak_in_flight(whole, worker) for worker in range(placement.num_workers))
            limits = (most,) * placement.num_stages
        bases = _orders_up_to(request, limits) or [_order(replace(request, split_backward=False))[0]]
        kept = placement.by_worker(limits)
    chosen = choose_split(bases, costs, kept)
    peaks = ",".join(str(peak_in_flight(chosen.schedule, worker)) for worker in range(placement.num_workers))
    unit = "assumed durations, no latency" if request.costs is None else "times in ms"
    reason = f"; {chosen.reason}, microbatches until the gradients of their weights by worker {peaks}; {unit}"
    return chosen.schedule, choose_lookahead(chosen.schedule, costs), reason


def _orders_up_to(request: ScheduleRequest, limits: tuple[int, ...]) -> list[Schedule]:
    """List orders of a plain pipeline that run further and further ahead, up to the limits; none for others."""
    placement = request.placement
    if placement.num_vstages > placement.num_stages or max(map(max, placement.joint)) > 1:
        return []
    least = one_f_one_b_limits(placement)
    most = max(0, *map(operator.sub, limits, least))
    steps = {most, *(more for more in _MORE_IN_FLIGHT if more < most)}
    ahead = {
        cut_in_flight(placement, [min(limit, own + more) for limit, own in zip(limits, least, strict=True)])
        for more in steps
    }
    return [one_f_one_b(placement, request.num_microbatches, in_flight=in_flight) for in_flight in sorted(ahead)]


def _u_costs(request: ScheduleRequest) -> Costs:
    return request.costs or u_costs(request.placement.num_stages, num_rings=num_rings(request.placement))


def _plan_u(request: ScheduleRequest, costs: Costs) -> tuple[UOrder, tuple[tuple[int, ...], str]]:
    """Plan the order of a U for some costs, under the limits that follow from those of the request."""
    placement = request.placement
    limits, why = choose_limits(request.in_flight, placement, _u_costs(request), request.num_microbatches)
    order = plan_u_shape(
        placement.num_stages,
        request.num_microbatches,
        costs,
        num_rings=num_rings(placement),
        num_replicas=placement.num_replicas,
        joint=placement.joint,
        num_frozen=placement.num_frozen,
        limits=placement.by_worker(limits),
        forward_only=request.forward_only,
    )
    return order, (limits, why)


def _u_order(request: ScheduleRequest) -> tuple[Schedule, int, str]:
    """Choose the order of a U; the reason names its costs, its limits, and the activations that it keeps."""
    costs = _u_costs(request)
    order, (limits, why) = _plan_u(request, costs)
    unit = "model durations, no latency" if request.costs is None else "times in ms"
    kept = "none kept" if request.forward_only else f"kept activations by chunk {_kept(order.schedule)}"
    limited = f"limit {','.join(map(str, limits))} ({why}), {kept}"
    return order.schedule, choose_lookahead(order.schedule, costs), f"; {order.reason}; {limited}; {unit}"


def _kept(schedule: Schedule) -> str:
    """List the most activations that each stage keeps for a backward at a time, those of its chunks joined by +.

    >>> from vtp_plugin.plan.schedule.make.u_shape import reference_u_shape
    >>> _kept(reference_u_shape(3, 8))
    '4+1,3,2'
    """
    by_stage = [most_activations(peaks_kept(schedule, stage)) for stage in range(schedule.placement.num_stages)]
    return ",".join("+".join(map(str, peaks)) for peaks in by_stage)
