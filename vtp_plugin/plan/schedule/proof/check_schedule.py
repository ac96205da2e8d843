"""Proof that a schedule computes everything once, pairs its messages and cannot deadlock."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Literal

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Op,
    Schedule,
    advance_orders,
    by_channel,
    channel_label,
    inputs_of,
    joint_with,
    peer_of,
    receives_for,
    sends_after,
    started_by,
    wait_for,
)

Mode = Literal["buffered", "rendezvous"]


def check(schedule: Schedule, *, limits: Sequence[int] | None = None) -> tuple[str, ...]:
    """List everything that is wrong with a schedule; an empty list proves it.

    The proof: every compute is there exactly once, on the worker that holds its virtual stage and handles its
    microbatch, a backward whole or in its two parts; the gradients of a weight are summed in the order of the
    microbatches' backwards; the workers' orders do not wait for each other in a circle, neither for results nor in
    joint computes; microbatches in flight keep the limits. With communication, also: every message is sent once, after
    the compute that makes it, and received once; every send and receive is waited for exactly once, after it is posted,
    a receive before the compute that takes it; on each channel the receives are posted in the order of the sends; and
    nothing deadlocks, whether sends are buffered or complete only with their receive (rendezvous). Each problem is one
    line that names an action. The search for deadlocks starts only if all else is right.

    Args:
        schedule: Compute only, or lowered.
        limits: Most microbatches in flight on each worker (see :func:`peak_in_flight`).

    >>> from dataclasses import replace
    >>> from vtp_plugin.plan.schedule.order.actions import parse_actions
    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> schedule = one_f_one_b(2, 1)
    >>> check(schedule, limits=(1, 1))
    ()
    >>> check(replace(schedule, orders=(parse_actions("0B0 0F0"), schedule.orders[1])))
    ('deadlock: stage 0 stands before 0B0, which needs 1B0, 0F0; stage 1 stands before 1F0, which needs 0F0',)
    >>> check(replace(schedule, orders=(parse_actions("0F0 0W0 0I0"), schedule.orders[1])))
    ('deadlock: stage 0 stands before 0W0, which needs 0I0',)
    """
    problems = [*_compute_problems(schedule)]
    if not problems:
        problems += _sum_problems(schedule)
    if limits is not None:
        problems += _limit_problems(schedule, limits)
    if not is_lowered(schedule):
        return tuple(problems) or tuple(_deadlock(schedule, "buffered"))
    problems += _message_problems(schedule)
    if not problems:
        problems += _order_problems(schedule)
    if not problems:
        problems += [*_deadlock(schedule, "buffered")] or [*_deadlock(schedule, "rendezvous")]
    return tuple(problems)


def require_valid(schedule: Schedule) -> None:
    """Stop the run if a schedule has a problem.

    Raises:
        PlanError: There are problems; the message shows the first ones.
    """
    if problems := check(schedule):
        raise PlanError.listing(f"invalid schedule {schedule.name}", problems)


def is_lowered(schedule: Schedule) -> bool:
    """Whether a schedule has communication."""
    return any(not action.op.is_compute for order in schedule.orders for action in order)


def peak_in_flight(schedule: Schedule, worker: int) -> int:
    """Return the largest number of microbatches of which a worker holds an activation at the same time.

    A microbatch is in flight on a worker from the start of its first compute there to the end of its last. The
    gradients of its weights count: they need inputs of layers.

    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> [peak_in_flight(one_f_one_b(3, 8), stage) for stage in range(3)]
    [3, 2, 1]
    """
    return max((live for live, _ in _in_flight(schedule, worker)), default=0)


def most_activations(moments: Sequence[Kept]) -> tuple[int, ...]:
    """Return the most activations of each chunk in what :func:`peaks_kept` returns; these may be at different times.

    >>> most_activations((((3, 0), (0, 0)), ((2, 0), (1, 0))))
    (3, 1)
    """
    return tuple(max(activations for activations, _ in of_chunk) for of_chunk in zip(*moments, strict=True))


def peaks_kept(schedule: Schedule, stage: int) -> tuple[Kept, ...]:
    """Return what one worker of a stage keeps at its fullest moments.

    A microbatch's activation is kept from its forward to the gradient of its input, then it waits until the gradients
    of its weights are there. Left out are moments of which another one has at least as many of all kinds; which of the
    others is the fullest depends on what each kind takes.

    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.make.split_backward import fill_waits
    >>> from vtp_plugin.plan.schedule.make.u_shape import interleaved_one_f_one_b, one_f_one_b
    >>> order = one_f_one_b(3, 8)
    >>> [peaks_kept(order, stage) for stage in range(3)]
    [(((3, 0),),), (((2, 0),),), (((1, 0),),)]
    >>> split, _ = fill_waits(order, uniform_costs(order.placement), (3, 3, 3), patience=1.0)
    >>> peaks_kept(split, 1)
    (((2, 1),), ((1, 2),))
    >>> peaks_kept(interleaved_one_f_one_b(2, 2, 4), 1)
    (((3, 0), (0, 0)), ((2, 0), (1, 0)))
    """
    placement = schedule.placement
    vstages = placement.vstages(stage)
    # Two places for each chunk: activations, and what waits.
    places = {vstage: 2 * chunk for chunk, vstage in enumerate(vstages) if placement.is_trained(vstage)}
    found = {(0,) * (2 * len(vstages))}
    workers = range(placement.num_replicas[stage]) if not schedule.forward_only else ()
    for replica in workers:
        now = [0] * (2 * len(vstages))
        for action in schedule.orders[placement.worker(stage, replica)]:
            place = places.get(action.vstage)
            if place is None or not action.op.is_compute:
                continue
            if action.op is Op.W:
                now[place + 1] -= 1
                continue
            now[place] += 1 if action.op is Op.F else -1
            now[place + 1] += action.op is Op.I
            if action.op is not Op.B:
                found.add(tuple(now))
    fullest: list[tuple[int, ...]] = []
    for one in sorted(found, reverse=True):
        # Whatever has at least as many of all kinds comes first.
        if not any(all(map(operator.ge, other, one)) for other in fullest):
            fullest.append(one)
    return tuple(tuple(zip(one[::2], one[1::2], strict=True)) for one in fullest)


def _in_flight(schedule: Schedule, worker: int) -> Iterator[tuple[int, Action]]:
    """Yield, with every compute of a worker, how many microbatches are in flight while it runs."""
    computes = [action for action in schedule.orders[worker] if action.op.is_compute]
    left = Counter(action.microbatch for action in computes)
    live: set[int] = set()
    for action in computes:
        live.add(action.microbatch)
        yield len(live), action
        left[action.microbatch] -= 1
        if not left[action.microbatch]:
            live.remove(action.microbatch)


def _compute_problems(schedule: Schedule) -> Iterator[str]:
    """Yield computes that are missing, repeated, or on the wrong worker."""
    placement = schedule.placement
    if len(schedule.orders) != placement.num_workers:
        yield f"{len(schedule.orders)} orders for {placement.num_workers} workers"
        return
    for worker, order in enumerate(schedule.orders):
        found = Counter(action for action in order if action.op.is_compute)
        # A backward that is there in part is split, so its other part must be there, too.
        split = {(action.vstage, action.microbatch) for action in found if action.op in (Op.I, Op.W)}
        wanted = Counter(
            Action(op=op, vstage=vstage, microbatch=microbatch)
            for vstage in placement.vstages(placement.stage_of(worker))
            for microbatch in placement.microbatches(worker, schedule.num_microbatches)
            for op in (Op.F, *_backward_ops(schedule, vstage, is_split=(vstage, microbatch) in split))
        )
        yield from _count_problems(placement.label(worker), found, wanted)


def _backward_ops(schedule: Schedule, vstage: int, *, is_split: bool) -> tuple[Op, ...]:
    """Return what makes the backward of one microbatch."""
    if schedule.forward_only or not schedule.placement.is_trained(vstage):
        return ()
    return (Op.I, Op.W) if is_split else (Op.B,)


def _sum_problems(schedule: Schedule) -> Iterator[str]:
    """Yield the first compute of each worker that adds to the gradients of weights out of turn.

    Norms and others that are not split get theirs with the gradient of the input, so that order is the order of both.
    """
    placement = schedule.placement
    for worker, order in enumerate(schedule.orders):
        for vstage in placement.vstages(placement.stage_of(worker)):
            own = [action for action in order if action.vstage == vstage]
            inputs = [action.microbatch for action in own if action.op in (Op.B, Op.I)]
            sums = [action for action in own if action.op in (Op.B, Op.W)]
            for due, action in zip(inputs, sums, strict=True):
                if action.microbatch != due:
                    yield (
                        f"{placement.label(worker)}: {action} adds to the gradients of weights where microbatch {due} "
                        "is due"
                    )
                    break


def _count_problems(label: str, found: Counter[Action], wanted: Counter[Action]) -> Iterator[str]:
    """Yield actions of a worker that are not there as often as they should be."""
    for action in sorted(found.keys() | wanted.keys()):
        if not wanted[action]:
            yield f"{label}: {action} does not belong there"
        elif found[action] != wanted[action]:
            yield f"{label}: {action} comes {found[action]} times instead of once"


def _limit_problems(schedule: Schedule, limits: Sequence[int]) -> Iterator[str]:
    """Yield the first compute of each worker at which too many microbatches are in flight."""
    for worker, limit in enumerate(limits):
        for live, action in (pair for pair in _in_flight(schedule, worker) if pair[0] > limit):
            label = schedule.placement.label(worker)
            yield f"{label}: {live} microbatches in flight at {action}, the limit is {limit}"
            break


def _message_problems(schedule: Schedule) -> Iterator[str]:
    """Yield sends, receives and waits that are missing, repeated, or on the wrong worker."""
    placement = schedule.placement
    for worker, order in enumerate(schedule.orders):
        computes = [action for action in order if action.op.is_compute]
        messages = [one for c in computes for find in (receives_for, sends_after) for one in find(placement, c)]
        wanted = Counter(action for message in messages for action in (message, wait_for(message)))
        found = Counter(action for action in order if not action.op.is_compute)
        yield from _count_problems(placement.label(worker), found, wanted)


def _order_problems(schedule: Schedule) -> Iterator[str]:
    """Yield actions that come too early on their worker, and channels whose two ends have different orders."""
    placement = schedule.placement
    for worker, order in enumerate(schedule.orders):
        index_of = {action: index for index, action in enumerate(order)}
        for action in order:
            pairs: list[tuple[Action, Action]] = []
            if action.op.is_compute:
                pairs += [(action, send) for send in sends_after(placement, action)]
                pairs += [(wait_for(receive), action) for receive in receives_for(placement, action)]
            elif action.op.startswith("WAIT"):
                pairs.append((started_by(action), action))
            for first, second in pairs:
                if index_of[first] > index_of[second]:
                    yield f"{placement.label(worker)}: {second} comes before {first}"
    actions = [*chain.from_iterable(schedule.orders)]
    sent = by_channel(placement, (action for action in actions if action.op in (Op.SEND_F, Op.SEND_B)))
    received = by_channel(placement, (action for action in actions if action.op in (Op.RECV_F, Op.RECV_B)))
    for channel in sorted(sent):
        for send, receive in zip(sent[channel], received[channel], strict=True):
            if peer_of(placement, send) != receive:
                yield f"{channel_label(placement, channel)}: {send} is sent where {receive} is received"
                break


def _deadlock(schedule: Schedule, mode: Mode) -> Iterator[str]:
    """Let all workers advance as far as they can; yield one line if some do not reach the end of their list."""
    lowered, placement = is_lowered(schedule), schedule.placement
    before = {action: last.whole for order in schedule.orders for last, action in pairwise(order)}
    names = {action.whole: action for order in schedule.orders for action in order}
    done: set[Action] = set()

    def needed(action: Action) -> set[Action]:
        own = _needed(schedule, action, mode, lowered)
        if not action.op.is_compute:
            return own
        # All that run it jointly must stand before it: their needs are met, and what they do before is done.
        others = joint_with(placement, action)
        needs = [_needed(schedule, one, mode, lowered) for one in others]
        return own.union(*needs, (before[one] for one in others if one in before))

    def run(_worker: int, action: Action) -> bool:
        if not needed(action) <= done:
            return False
        done.add(action.whole)
        return True

    reached = advance_orders(schedule.orders, run)
    stuck = [
        f"{placement.label(worker)} stands before {order[index]}, which needs "
        + ", ".join(str(names.get(one, one)) for one in sorted(needed(order[index]) - done))
        for worker, (order, index) in enumerate(zip(schedule.orders, reached, strict=True))
        if index < len(order)
    ]
    if stuck:
        yield ("deadlock in rendezvous mode: " if mode == "rendezvous" else "deadlock: ") + "; ".join(stuck)


def _needed(schedule: Schedule, action: Action, mode: Mode, lowered: bool) -> set[Action]:
    """Return the actions that must be done before a worker can get past an action."""
    if action.op.is_compute:
        computes = inputs_of(schedule.placement, action)
        stage_of = schedule.placement.stages
        # In a lowered schedule the wait before the compute takes care of what other workers do. Comparing stages is
        # enough: all virtual stages of one stage handle a microbatch on the same worker.
        return {c for c in computes if not lowered or stage_of[c.vstage] == stage_of[action.vstage]}
    if action.op in (Op.WAIT_RECV_F, Op.WAIT_RECV_B):
        receive = started_by(action)
        return {receive, peer_of(schedule.placement, receive)}
    if action.op in (Op.WAIT_SEND_F, Op.WAIT_SEND_B):
        send = started_by(action)
        return {send, peer_of(schedule.placement, send)} if mode == "rendezvous" else {send}
    return set()  # posting a send or a receive never blocks
