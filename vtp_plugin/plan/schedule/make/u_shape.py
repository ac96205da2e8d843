"""Orders of a U: rankings, limits, and the rules that are tried.

Orders of compute that follow a fixed rule: forward only, 1F1B and interleaved 1F1B.

A generator only decides which microbatch of which virtual stage a worker computes next;
:func:`~vtp_plugin.plan.schedule.order.add_communication.lower` adds the communication.
:mod:`vtp_plugin.plan.schedule.make.u_shape` orders the U-shape.

The U-shaped pipeline: stage 0, the edge, runs the first and the last part of the model.

The edge has four kinds of work: FS and BE, forward and backward of the first part; FE and BS, forward and backward of
the last part. A microbatch passes FS, the cloud, FE, BS, the cloud backwards, BE. The choice of what the edge runs next
decides how much of the links' latency is hidden, and no single rule is good for all durations and latencies. So the
planner builds and simulates a portfolio of orders, and takes the best.

With several rings, for example an encoder's and then a language model's, the edge has parts between them: its kinds of
work are F1, F2, .., and the backwards .., B2, B1.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

from vtp_plugin.errors import ConfigError, LayoutError, PlanError
from vtp_plugin.plan.schedule.cost.costs import (
    ROUNDING,
    Costs,
    MicrobatchRoute,
    in_flight_needed_on,
    lower_bound,
    make_route,
)
from vtp_plugin.plan.schedule.make.leg_orders import (
    Orders,
    dispatch,
    in_flight,
    in_ticks,
    makespan,
    mirrored,
    to_actions,
)
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, Schedule
from vtp_plugin.plan.schedule.order.placement import (
    Joint,
    Placement,
    interleaved_placement,
    plain_placement,
    u_placement,
)
from vtp_plugin.plan.schedule.proof.check_schedule import check
from vtp_plugin.util.text import in_digits

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

    The default on every worker is :func:`~vtp_plugin.plan.schedule.cost.costs.in_flight_needed`, which keeps the
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


# Rankings of the edge's legs, most urgent first. These 7 of the 24 possible ones include a best one in every case of a
# grid with cloud times 1, 2, 3, 2 to 8 stages and latencies 0 to 4. FE makes BS possible, so BS first is the rule that
# keeps the fewest activations of the last part.
_EDGE_RANKINGS = (
    ("BS", "FS", "FE", "BE"),
    ("BS", "FE", "FS", "BE"),
    ("BE", "BS", "FS", "FE"),
    ("BS", "BE", "FS", "FE"),
    ("BS", "BE", "FE", "FS"),
    ("BS", "FE", "BE", "FS"),
    ("BS", "FS", "BE", "FE"),
)
_EDGE_LEGS = ("FS", "FE", "BS", "BE")
# The same for two rings. Of the 720 possible ones these include a best one in each of 38 cases: 2 and 3 stages, cloud
# times 1, 2 and 3, latencies 0 to 4, 6 to 12 microbatches, encoders as long as the language model or half as long.
_TWO_RING_RANKINGS = (
    ("F1", "F2", "B2", "F3", "B1", "B3"),
    ("F2", "F3", "F1", "B3", "B2", "B1"),
    ("F1", "B3", "F3", "F2", "B1", "B2"),
    ("F2", "B3", "B2", "F3", "F1", "B1"),
    ("F2", "F1", "B1", "B3", "B2", "F3"),
    ("F3", "B3", "B1", "F1", "F2", "B2"),
)


def rankings(route: MicrobatchRoute) -> Iterator[tuple[list[tuple[int, ...]], str]]:
    """Yield a ranking of its legs for every stage, with a name; the cloud prefers backwards, or forwards.

    >>> from vtp_plugin.plan.schedule.cost.costs import make_route
    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> next(rankings(make_route(u_placement(2, num_rings=2), u_costs(2, num_rings=2))))
    ([(0, 2, 7, 4, 9, 5), (8, 6, 3, 1)], 'edge F1>F2>B2>F3>B1>B3, cloud B first')
    """
    edge_legs = route.legs(0)
    # The edge ends the model and begins to go back; of a route without backwards that is where it ends.
    turn = next((q for q, pair in enumerate(pairwise(route.stages)) if pair == (0, 0)), route.num_legs - 1)
    num_forward = sum(q <= turn for q in edge_legs)
    is_forward_only = num_forward == len(edge_legs)
    kinds, edge_rankings = _edge_rankings(num_forward, len(edge_legs) - num_forward)
    for edge, cloud in product(edge_rankings, ("",) if is_forward_only else ("B", "F")):
        cloud_rankings = [route.legs(stage)[:: -1 if cloud == "B" else 1] for stage in range(1, route.num_stages)]
        name = f"edge {'>'.join(edge)}" + (f", cloud {cloud} first" if cloud else "")
        yield [tuple(edge_legs[kinds.index(kind)] for kind in edge), *cloud_rankings], name


def _edge_rankings(num_forward: int, num_backward: int) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of the edge's legs, in the order of the route, and the rankings to try.

    Parts that train nothing have no backward; with time reversed they have no forward.
    """
    num_parts = max(num_forward, num_backward)
    forwards = tuple(f"F{i + 1}" for i in range(num_parts))[num_parts - num_forward :]
    if not num_backward:
        names = forwards if num_parts > 2 else _EDGE_LEGS[:num_parts]
        return names, (names[::-1], names)
    if num_parts == num_forward == num_backward == 2:
        return _EDGE_LEGS, _EDGE_RANKINGS
    kinds = (*forwards, *(f"B{i}" for i in range(num_parts, num_parts - num_backward, -1)))
    if num_parts != 3:  # no portfolio was looked for
        return kinds, (kinds, kinds[::-1])
    return kinds, tuple(tuple(kind for kind in ranking if kind in kinds) for ranking in _TWO_RING_RANKINGS)


def require_counts(num_stages: int, num_microbatches: int) -> None:
    """Refuse a pipeline without stages and a step without microbatches.

    Raises:
        ConfigError: A count is below 1.
    """
    if num_stages < 1 or num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches on {num_stages} stages: both must be at least 1")


def require_shares(placement: Placement, num_microbatches: int) -> None:
    """Refuse a number of microbatches that the replicas of a stage cannot share evenly.

    Raises:
        ConfigError: A remainder is left.
    """
    for stage, num_replicas in enumerate(placement.num_replicas):
        if num_microbatches % num_replicas:
            raise ConfigError(
                f"{num_microbatches} microbatches for {num_replicas} replicas of stage {stage}: "
                f"{num_microbatches} mod {num_replicas} = {num_microbatches % num_replicas} must be 0"
            )


def plain_forward_only(stages: int | Placement, num_microbatches: int) -> Schedule:
    """Run all microbatches forward through stages with one virtual stage each, for evaluation.

    Args:
        stages: Number of stages of a plain pipeline, or a placement: with replicas, or a tree.
        num_microbatches: Microbatches of the step; every stage's replicas share them.

    >>> print(plain_forward_only(2, 3).describe())
    stage 0: 0F0 0F1 0F2
    stage 1: 1F0 1F1 1F2
    """
    placement = _placement(stages, num_microbatches)
    return Schedule(
        name="forward-only",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(tuple(_computes(Op.F, placement, w, num_microbatches)) for w in range(placement.num_workers)),
        forward_only=True,
    )


def one_f_one_b(
    stages: int | Placement, num_microbatches: int, *, in_flight: tuple[int, ...] | None = None
) -> Schedule:
    """Order stages with one virtual stage each as 1F1B.

    (PipeDream-Flush; Megatron's `forward_backward_pipelining_without_interleaving`, for several modules too.)

    A worker of stage s runs k_s - 1 forwards (or all, if there are fewer), then one forward and one backward in turn,
    then the remaining backwards: at most k_s microbatches are in flight on it. One of them is being computed here; the
    others are this worker's share of what the next stage may have in flight on its n_(s+1) replicas:
    k_s = 1 + ceil(n_(s+1) k_(s+1) / n_s), and 1 on the last stage. Without replicas that is the number of stages from
    here to the last one, as in Megatron.

    Stages cannot wait for each other in a circle: before its backward of microbatch h, stage s runs forwards up to
    h + n_s (k_s - 1). An earlier stage r runs its forward of x directly after its backward of x - n_r k_r, which is a
    microbatch before h as long as n_s (k_s - 1) < n_r k_r. So everything waits for earlier microbatches or for later
    stages. A joint compute takes a microbatch of each of up to n_s replicas, and n_r k_r >= n_s k_s + n_r leaves room
    for those. (Megatron's P - s breaks this for 1, 3, 3 and for 1, 2, 2, 2 replicas.) In a tree the next stage is the
    successor, and stages of which neither comes before the other do not wait for each other.

    Args:
        stages: Number of stages of a plain pipeline, or a placement: with replicas, or a tree.
        num_microbatches: Microbatches of the step; every stage's replicas share them.
        in_flight: Other values of k, by stage; larger ones on the first stages hide latency, and let an encoder run
            ahead.

    Raises:
        ConfigError: A count is below 1, replicas cannot share the microbatches, or stages, or replicas that compute
            jointly, would wait for each other in a circle.

    >>> print(one_f_one_b(2, 3).describe())
    stage 0: 0F0 0F1 0B0 0F2 0B1 0B2
    stage 1: 1F0 1B0 1F1 1B1 1F2 1B2
    >>> print(one_f_one_b(plain_placement(2, num_replicas=(1, 2)), 4).describe())
    stage 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    stage 1 replica 0: 1F0 1B0 1F2 1B2
    stage 1 replica 1: 1F1 1B1 1F3 1B3
    >>> print(one_f_one_b(Placement(stages=(0, 1), num_frozen=1), 2).describe())
    stage 0: 0F0 0F1
    stage 1: 1F0 1B0 1F1 1B1
    >>> print(one_f_one_b(Placement(stages=(0, 1, 2), successors=(2, 2)), 2, in_flight=(2, 1, 1)).describe())
    stage 0: 0F0 0F1 0B0 0B1
    stage 1: 1F0 1B0 1F1 1B1
    stage 2: 2F0 2B0 2F1 2B1
    """
    placement = _placement(stages, num_microbatches)
    in_flight = one_f_one_b_limits(placement) if in_flight is None else in_flight
    _check_in_flight(placement, num_microbatches, in_flight)
    orders: list[Actions] = []
    for worker in range(placement.num_workers):
        forwards = _computes(Op.F, placement, worker, num_microbatches)
        backwards = _computes(Op.B, placement, worker, num_microbatches)
        orders.append(_one_f_one_b_order(forwards, backwards, in_flight[placement.stage_of(worker)] - 1))
    schedule = Schedule(
        name="1f1b",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(_trained(placement, order) for order in orders),
    )
    # Without joint computes the condition above is enough, and the default limits are enough in any case.
    if in_flight != (least := one_f_one_b_limits(placement)) and max(map(max, placement.joint)) > 1 and check(schedule):
        raise too_few_in_flight(in_flight, least)
    return schedule


def one_f_one_b_limits(placement: Placement) -> tuple[int, ...]:
    """Return k of :func:`one_f_one_b`, by stage: the most microbatches in flight on a worker with enough of them.

    >>> [one_f_one_b_limits(plain_placement(3, num_replicas=n)) for n in ((), (1, 3, 3), (2, 1, 2))]
    [(3, 2, 1), (7, 2, 1), (3, 3, 1)]
    >>> one_f_one_b_limits(Placement(stages=(0, 1, 2, 3), successors=(2, 2, 3)))
    (3, 3, 2, 1)
    """
    limits = [1] * placement.num_stages
    for here, behind in zip(range(placement.num_stages - 2, -1, -1), placement.successors[::-1], strict=True):
        limits[here] = 1 + math.ceil(placement.num_replicas[behind] * limits[behind] / placement.num_replicas[here])
    return tuple(limits)


def cut_in_flight(placement: Placement, in_flight: Sequence[int]) -> tuple[int, ...]:
    """Cut values of k, by stage, to the largest ones under which stages of :func:`one_f_one_b` wait in no circle.

    >>> cut_in_flight(plain_placement(3), (3, 1, 3)), cut_in_flight(plain_placement(2, num_replicas=(2, 1)), (1, 3))
    ((3, 1, 1), (1, 2))
    """
    allowed, replicas = list(in_flight), placement.num_replicas
    for stage, later in combinations(range(placement.num_stages), 2):
        if later in _route(placement, stage):
            allowed[later] = min(allowed[later], 1 + (replicas[stage] * allowed[stage] - 1) // replicas[later])
    return tuple(allowed)


def interleaved_one_f_one_b(
    num_stages: int,
    num_chunks: int,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    num_frozen: int = 0,
    forward_only: bool = False,
) -> Schedule:
    """Order an interleaved pipeline as Megatron's `forward_backward_pipelining_with_interleaving` does (0.19).

    Microbatches run in groups: a stage runs a group through its first chunk, then through its second, and so on;
    gradients pass the chunks in reverse order.

    Args:
        num_stages: Pipeline stages, P.
        num_chunks: Model chunks on each stage, at least 2.
        num_microbatches: Microbatches of the step, m.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`, from P to m; P by default.
        num_frozen: Virtual stages that train nothing. See :attr:`Placement.num_frozen`.
        forward_only: No backward pass.

    Raises:
        ConfigError: A count is too small, the group size does not lie between P and m, or the last group, m mod group
            size, is neither empty nor at least P microbatches.

    >>> print(interleaved_one_f_one_b(2, 2, 2).describe())
    stage 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    stage 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    require_counts(num_stages, num_microbatches)
    group_size = num_stages if group_size is None else group_size
    _check_groups(num_stages, num_chunks, num_microbatches, group_size)
    placement = replace(interleaved_placement(num_stages, num_chunks), num_frozen=num_frozen)
    orders: list[Actions] = []
    for stage in range(num_stages):
        vstages = placement.vstages(stage)
        forwards = [_compute(Op.F, v, n) for v, n in _grouped(vstages, num_microbatches, group_size)]
        backwards = [_compute(Op.B, v, n) for v, n in _grouped(vstages[::-1], num_microbatches, group_size)]
        num_warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * group_size
        order = tuple(forwards) if forward_only else _one_f_one_b_order(forwards, backwards, num_warmup)
        orders.append(_trained(placement, order))
    return Schedule(
        name="interleaved-forward-only" if forward_only else "interleaved-1f1b",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=tuple(orders),
        forward_only=forward_only,
    )


def _placement(stages: int | Placement, num_microbatches: int) -> Placement:
    """Return the placement of stages with one virtual stage each, for so many microbatches."""
    require_counts(stages if isinstance(stages, int) else stages.num_stages, num_microbatches)
    placement = plain_placement(stages) if isinstance(stages, int) else stages
    require_shares(placement, num_microbatches)
    return placement


def _check_in_flight(placement: Placement, num_microbatches: int, in_flight: tuple[int, ...]) -> None:
    """Refuse limits under which stages would wait for each other in a circle."""
    if len(in_flight) != placement.num_stages or min(in_flight) < 1:
        raise ConfigError(f"{in_flight} microbatches in flight on {placement.num_stages} stages: each needs at least 1")
    # By stage: how many microbatches its workers may have in flight together, and how far its forwards run ahead of
    # its backwards. The docstring of one_f_one_b derives the condition.
    capacity = [min(n * k, num_microbatches) for n, k in zip(placement.num_replicas, in_flight, strict=True)]
    ahead = [most - n for n, most in zip(placement.num_replicas, capacity, strict=True)]
    for stage, later in combinations(range(placement.num_stages), 2):
        if later in _route(placement, stage) and ahead[later] >= capacity[stage]:
            raise ConfigError(
                f"{in_flight} microbatches in flight on stages with {placement.num_replicas} replicas would deadlock: "
                f"stage {later} would wait for {ahead[later]} microbatches more than it has run backwards, and stage "
                f"{stage} has at most {capacity[stage]} in flight, which must be more"
            )


def _route(placement: Placement, stage: int) -> Iterator[int]:
    """Yield the stages that a stage's output passes, up to the last."""
    while stage < placement.num_stages - 1:
        stage = placement.successors[stage]
        yield stage


def _compute(op: Op, vstage: int, microbatch: int) -> Action:
    return Action(op=op, vstage=vstage, microbatch=microbatch)


def _computes(op: Op, placement: Placement, worker: int, num_microbatches: int) -> list[Action]:
    """List the forwards or backwards of a worker of a plain pipeline."""
    stage = placement.stage_of(worker)
    return [_compute(op, stage, h) for h in placement.microbatches(worker, num_microbatches)]


def _one_f_one_b_order(forwards: list[Action], backwards: list[Action], num_warmup: int) -> Actions:
    """Run `num_warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    steady = [action for pair in zip(forwards[num_warmup:], backwards, strict=False) for action in pair]
    return (*forwards[:num_warmup], *steady, *backwards[len(steady) // 2 :])


def _trained(placement: Placement, order: Actions) -> Actions:
    """Leave out the backwards of what trains nothing: then less waits, and no stage for another one in a circle."""
    return tuple(action for action in order if action.op is Op.F or placement.is_trained(action.vstage))


def _grouped(vstages: tuple[int, ...], num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """List `(vstage, microbatch)`: every group of microbatches through all virtual stages before the next group."""
    return [
        (vstage, microbatch)
        for start in range(0, num_microbatches, group_size)
        for vstage in vstages
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def _check_groups(num_stages: int, num_chunks: int, num_microbatches: int, group_size: int) -> None:
    if num_chunks < 2:
        raise ConfigError(f"interleaving with {num_chunks} chunk on each stage: it needs at least 2; use 1F1B for 1")
    if not num_stages <= group_size <= num_microbatches:
        raise ConfigError(
            f"microbatch group size {group_size} with {num_stages} stages and {num_microbatches} microbatches: "
            "it must lie between the number of stages and the number of microbatches"
        )
    remainder = num_microbatches % group_size
    if 0 < remainder < num_stages:
        raise ConfigError(
            f"{num_microbatches} microbatches in groups of {group_size} leave {remainder} for the last group: "
            f"it must be empty or at least the number of stages, {num_stages}"
        )


_CLOUD_SLACKS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, math.inf)  # microbatches above need; infinity: up to the limit
_EDGE_SLACKS = (0, 1, 2, math.inf)
_NUM_PERTURBED = 160
_SHARES = (0.1, 0.2, 0.3)  # of the decisions that a perturbed rule bases on another ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class UOrder:
    """The chosen order, and why it was chosen.

    Attributes:
        schedule: Order of compute.
        candidate: Name of the rule that gave it.
        makespan: Its simulated time, in the unit of the costs.
        lower_bound: Time that no order can beat under the limits.
        reference_makespan: Time of the reference's order; None if that breaks a limit or does not exist (forward only,
            replicas, several rings).
        in_flight: Most microbatches in flight on each worker, never above the limits.
        num_candidates: How many orders were simulated.
    """

    schedule: Schedule
    candidate: str
    makespan: float
    lower_bound: float
    reference_makespan: float | None
    in_flight: tuple[int, ...]
    num_candidates: int

    @property
    def reason(self) -> str:
        """Say in one line what was chosen and why."""
        is_optimal = self.makespan <= self.lower_bound * (1 + ROUNDING)
        bound = "which no order can beat" if is_optimal else f"lower bound {in_digits(self.lower_bound, 6)}"
        reference = (
            "" if self.reference_makespan is None else f", reference order {in_digits(self.reference_makespan, 6)}"
        )
        by = "stage" if max(self.schedule.placement.num_replicas) == 1 else "worker (stage by stage)"
        return (
            f"U-shaped schedule {self.schedule.digest}: {self.candidate}, best of {self.num_candidates} candidates; "
            f"step {in_digits(self.makespan, 6)} ({bound}{reference}), "
            f"microbatches in flight by {by} {','.join(map(str, self.in_flight))}"
        )


def reference_orders(num_stages: int, num_microbatches: int) -> Orders:
    """Order the U-shape as MindSpeed's layerwise disaggregated training does.

    The orders are legs of a :mod:`~vtp_plugin.plan.schedule.cost.costs`. The edge runs min(P, m) FS; K times
    FE, BS; then FS, FE, BS, BE in turn; then the remaining BE. Cloud stage r runs 1F1B after min(P - r, m) forwards. K
    is `int((4 P + 1) / 6)`, here at most m: with fewer microbatches the original fails.

    >>> reference_orders(2, 2)
    ((0, 0, 2, 3, 2, 3, 5, 5), (1, 1, 4, 4))
    """
    fs, fe, bs, be = 0, num_stages, num_stages + 1, 2 * num_stages + 1
    num_warmup = min(num_stages, num_microbatches)
    num_early = min((4 * num_stages + 1) // 6, num_microbatches)
    edge = [fs] * num_warmup + [fe, bs] * num_early
    for n in range(num_microbatches - num_early):
        edge += [fs, fe, bs, be] if n < num_microbatches - num_warmup else [fe, bs, be]
    orders = [(*edge, *[be] * num_early)]
    for stage in range(1, num_stages):
        forward, backward = stage, 2 * num_stages + 1 - stage
        num_warmup = min(num_stages - stage, num_microbatches)
        steady = [forward, backward] * (num_microbatches - num_warmup)
        orders.append((*[forward] * num_warmup, *steady, *[backward] * num_warmup))
    return tuple(orders)


def reference_u_shape(num_stages: int, num_microbatches: int) -> Schedule:
    """Return :func:`reference_orders` as a schedule, the baseline for the planned order.

    >>> print(reference_u_shape(2, 2).describe())
    stage 0: 0F0 0F1 2F0 2B0 2F1 2B1 0B0 0B1
    stage 1: 1F0 1F1 1B0 1B1
    """
    placement = u_placement(num_stages)
    require_counts(num_stages, num_microbatches)
    return Schedule(
        name="u-shape-reference",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=to_actions(placement, reference_orders(num_stages, num_microbatches)),
    )


def plan_u_shape(
    num_stages: int,
    num_microbatches: int,
    costs: Costs,
    *,
    num_rings: int = 1,
    num_replicas: tuple[int, ...] = (),
    joint: Joint = (),
    num_frozen: int = 0,
    limits: Sequence[int] | None = None,
    forward_only: bool = False,
) -> UOrder:
    """Choose the order of a U-shaped pipeline.

    The candidates are greedy rules under many caps of microbatches in flight, the same with time reversed, the
    reference's order, and, if no rule reaches the lower bound, perturbed rules. The shortest simulated step wins; ties
    go to the order with fewer microbatches in flight on a worker, summed over the stages, then to the first. Caps grow
    from level to level, and the search stops after a level that reaches the lower bound. The result is a function of
    the arguments alone, and never slower than the reference if the reference keeps the limits. All ranks must pass the
    same costs, so they must agree on measured ones first. Times are compared to seven digits of the longest.

    Args:
        num_stages: Pipeline stages with the edge, P >= 2.
        num_microbatches: Microbatches of the step, m >= 1; every stage's replicas share them.
        costs: Costs of the P + 1 virtual stages; with R rings, of all R P + 1.
        num_rings: How often a microbatch passes the cloud, R.
        num_replicas: Replicas of every stage; one each by default.
        joint: Which replicas wait for each other in which computes; none by default. See :attr:`Placement.joint`.
        num_frozen: Virtual stages that train nothing. See :attr:`Placement.num_frozen`.
        limits: Most microbatches in flight on each worker: it holds an activation of each, from the start of its first
            forward to the end of its last backward. No limit by default.
        forward_only: No backward pass; a limit then counts from the start of FS to the end of FE on the edge.

    Raises:
        ConfigError: P < 2, m < 1, not one limit for each worker, a limit below 1 or below what a joint compute takes,
            costs of another placement, or replicas that cannot share the microbatches or serve each other in turn.

    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> plan = plan_u_shape(3, 16, u_costs(3, latency=2.0), limits=(7, 7, 7))
    >>> plan.makespan, plan.lower_bound, plan_u_shape(3, 16, u_costs(3, latency=2.0)).reference_makespan
    (109.0, 109.0, 129.0)
    """
    alone = u_placement(num_stages, num_rings=num_rings, num_replicas=num_replicas, joint=joint)
    placement = replace(alone, num_frozen=num_frozen)
    require_counts(num_stages, num_microbatches)
    require_shares(placement, num_microbatches)
    limits = (num_microbatches,) * placement.num_workers if limits is None else tuple(limits)
    _check_limits(limits, placement)
    if len(costs.forward) != placement.num_vstages:
        rings = "" if num_rings == 1 else f" and {num_rings} rings"
        raise ConfigError(
            f"costs of {len(costs.forward)} virtual stages: a U of {num_stages} stages{rings} has "
            f"{placement.num_vstages}"
        )

    route = make_route(placement, costs, forward_only=forward_only)
    search = _Search(in_ticks(route), num_microbatches, limits)
    # The reference knows neither evaluation nor replicas nor frozen layers, and one ring only.
    has_reference = not forward_only and max(placement.num_replicas) == num_rings == 1 and not num_frozen
    reference = search.try_reference() if has_reference else None
    search.try_rules()
    search.try_perturbed()
    _, _, name, orders = search.best
    schedule = Schedule(
        name="u-shape-forward-only" if forward_only else "u-shape",
        placement=placement,
        num_microbatches=num_microbatches,
        orders=to_actions(placement, orders),
        forward_only=forward_only,
    )
    span = makespan(route, num_microbatches, orders)
    assert span is not None
    return UOrder(
        schedule=schedule,
        candidate=name,
        makespan=span,
        lower_bound=lower_bound(route, num_microbatches, search.limits),
        reference_makespan=makespan(route, num_microbatches, reference) if reference else None,
        in_flight=in_flight(route, orders),
        num_candidates=search.num_tried,
    )


def _check_limits(limits: tuple[int, ...], placement: Placement) -> None:
    if len(limits) != placement.num_workers:
        replicas = f" with {placement.num_replicas} replicas" if max(placement.num_replicas) > 1 else ""
        raise ConfigError(
            f"in-flight limits {limits}: {placement.num_stages} stages{replicas} need {placement.num_workers} entries"
        )
    if min(limits) < 1:
        raise ConfigError(f"in-flight limits {limits}: no microbatch could ever start; every entry must be at least 1")
    if any(map(operator.lt, limits, least := placement.by_worker(placement.least_in_flight))):
        raise ConfigError(f"in-flight limits {limits}: replicas that compute jointly need at least {least}")


class _Search:
    """Simulates candidates and keeps the best."""

    def __init__(self, route: MicrobatchRoute, num_microbatches: int, limits: tuple[int, ...]) -> None:
        self.route = route
        # With time as it is, and reversed: a bool is the index.
        self.routes = (route, route.reversed())
        self.rankings = tuple(tuple(rankings(one)) for one in self.routes)
        self.num_microbatches = num_microbatches
        self.limits = tuple(
            min(limit, num_microbatches // route.num_replicas[stage])
            for limit, (stage, _) in zip(limits, route.workers, strict=True)
        )
        self.bound = lower_bound(route, num_microbatches, self.limits)
        self.best: tuple[float, int, str, Orders] = (math.inf, 0, "", ())
        self.num_tried = 0

    @property
    def is_done(self) -> bool:
        """Whether no order can be faster than the best one so far."""
        return self.best[0] <= self.bound

    def offer(self, name: str, orders: Orders) -> float:
        """Simulate a candidate, keep it if it is the best so far, and return its time."""
        span = makespan(self.route, self.num_microbatches, orders)
        if span is None:
            raise PlanError(f"{name}: deadlock: the orders wait for each other")
        self.num_tried += 1
        # Peaks take time to count and matter only in a tie or for a new best.
        if span <= self.best[0] and (span, memory := sum(self._peaks(orders))) < self.best[:2]:
            self.best = (span, memory, name, orders)
        return span

    def _peaks(self, orders: Orders) -> list[int]:
        """Return the most microbatches in flight on a worker, by stage."""
        peaks = in_flight(self.route, orders)
        firsts = self.route.first_workers
        return [max(peaks[first : first + num]) for first, num in zip(firsts, self.route.num_replicas, strict=True)]

    def try_reference(self) -> Orders | None:
        """Offer the reference's order and return it; None if it breaks a limit."""
        orders = reference_orders(self.route.num_stages, self.num_microbatches)
        peaks = in_flight(self.route, orders)
        if any(peak > limit for peak, limit in zip(peaks, self.limits, strict=True)):
            return None
        self.offer("the reference's order", orders)
        return orders

    def try_rules(self) -> None:
        """Offer every greedy rule, forward and reversed in time, under caps that grow from level to level."""
        needs = [in_flight_needed_on(self.route, stage) for stage, _ in self.route.workers]
        # The limits themselves come first: their result is hard to beat, so most caps below need no simulation.
        levels = [[self.limits]]
        levels += [[self._caps(needs, slack, edge_slack) for edge_slack in _EDGE_SLACKS] for slack in _CLOUD_SLACKS]
        tried: set[tuple[int, ...]] = set()
        for number, level in enumerate(levels):
            spans = [math.inf]
            for caps in level:
                if caps not in tried and lower_bound(self.route, self.num_microbatches, caps) <= self.best[0]:
                    tried.add(caps)
                    for rule, is_reversed in product(range(len(self.rankings[0])), (False, True)):
                        spans.append(self._offer_rule(rule, is_reversed, caps))
            if number and min(spans) <= self.bound:
                return

    def try_perturbed(self) -> None:
        """Offer rules that sometimes follow another ranking on the edge, until nothing is left to gain."""
        for seed in range(_NUM_PERTURBED):
            if self.is_done:
                return
            rule = seed // 2 % len(self.rankings[0])
            self._offer_rule(rule, seed % 2 == 1, self.limits, seed)

    def _caps(self, needs: list[int], slack: float, edge_slack: float) -> tuple[int, ...]:
        """Allow every worker as many microbatches in flight as it needs plus a slack, within its limit."""
        num_replicas = self.route.num_replicas
        caps: list[int] = []
        for (stage, _), needed, limit in zip(self.route.workers, needs, self.limits, strict=True):
            # One more on each replica of a wide stage means this many more on a worker of a narrow stage.
            share = math.ceil(max(num_replicas) / num_replicas[stage])
            extra = share * (slack + edge_slack if stage == 0 else slack)
            caps.append(int(min(limit, needed + extra)))
        return tuple(caps)

    def _offer_rule(self, rule: int, is_reversed: bool, caps: tuple[int, ...], seed: int | None = None) -> float:
        """Build orders by a greedy rule and offer them; a seed perturbs the rule."""
        route, rankings = self.routes[is_reversed], self.rankings[is_reversed]
        ranking, name = rankings[rule]
        detours = None if seed is None else _detours([edge for (edge, *_), _ in rankings], seed)
        limits = [caps[mirror] for mirror in route.mirrors] if is_reversed else caps
        orders = dispatch(route, self.num_microbatches, ranking, limits, detours)
        if is_reversed:
            orders = mirrored(route, orders)
        direction = "reversed" if is_reversed else "forward"
        perturbed = "" if seed is None else f", perturbed {seed}"
        return self.offer(f"greedy {direction} in time, {name}, caps {','.join(map(str, caps))}{perturbed}", orders)


def _detours(rankings: Sequence[Sequence[int]], seed: int) -> Iterator[Sequence[int] | None]:
    """Yield a ranking for a share of the decisions, None for the others; the same on every rank and Python version."""
    # `random()` is the only method whose numbers for a given seed Python promises not to change.
    numbers = random.Random(seed)
    share = _SHARES[seed % len(_SHARES)]
    while True:
        yield rankings[int(numbers.random() * len(rankings))] if numbers.random() < share else None
