"""Orders of compute that follow a fixed rule: forward only, 1F1B and interleaved 1F1B.

A generator only decides which microbatch of which virtual stage a worker computes next;
:func:`~vtp_plugin.plan.schedule.order.add_communication.lower` adds the communication.
:mod:`vtp_plugin.plan.schedule.make.u_shape` orders the U-shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.schedule.make.limits import too_few_in_flight
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.placement import Placement, interleaved_placement, plain_placement
from vtp_plugin.plan.schedule.order.schedule import Actions, Schedule
from vtp_plugin.plan.schedule.proof.check_schedule import check


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
    schedule = Schedule(name="1f1b", placement=placement, num_microbatches=num_microbatches, orders=tuple(orders))
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
    placement = interleaved_placement(num_stages, num_chunks)
    orders: list[Actions] = []
    for stage in range(num_stages):
        vstages = placement.vstages(stage)
        forwards = [_compute(Op.F, v, n) for v, n in _grouped(vstages, num_microbatches, group_size)]
        backwards = [_compute(Op.B, v, n) for v, n in _grouped(vstages[::-1], num_microbatches, group_size)]
        num_warmup = 2 * (num_stages - 1 - stage) + (num_chunks - 1) * group_size
        orders.append(tuple(forwards) if forward_only else _one_f_one_b_order(forwards, backwards, num_warmup))
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
