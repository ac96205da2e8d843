"""The U-shaped pipeline: stage 0, the edge, runs the first and the last part of the model.

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
from itertools import product

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.microbatch_route import MicrobatchRoute, make_route
from vtp_plugin.plan.schedule.cost.step_bounds import ROUNDING, in_flight_needed_on, lower_bound
from vtp_plugin.plan.schedule.make.generate import require_counts, require_shares
from vtp_plugin.plan.schedule.make.leg_orders import (
    Orders,
    dispatch,
    in_flight,
    in_ticks,
    makespan,
    mirrored,
    to_actions,
)
from vtp_plugin.plan.schedule.make.rankings import rankings
from vtp_plugin.plan.schedule.order.placement import Joint, Placement, u_placement
from vtp_plugin.plan.schedule.order.schedule import Schedule

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
        bound = "which no order can beat" if is_optimal else f"lower bound {self.lower_bound:.6g}"
        reference = "" if self.reference_makespan is None else f", reference order {self.reference_makespan:.6g}"
        by = "stage" if max(self.schedule.placement.num_replicas) == 1 else "worker (stage by stage)"
        return (
            f"U-shaped schedule {self.schedule.digest}: {self.candidate}, best of {self.num_candidates} candidates; "
            f"step {self.makespan:.6g} ({bound}{reference}), "
            f"microbatches in flight by {by} {','.join(map(str, self.in_flight))}"
        )


def reference_orders(num_stages: int, num_microbatches: int) -> Orders:
    """Order the U-shape as MindSpeed's layerwise disaggregated training does.

    The orders are legs of a :mod:`~vtp_plugin.plan.schedule.cost.microbatch_route`. The edge runs min(P, m) FS; K times
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
