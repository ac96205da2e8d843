"""Add the communication to an order of compute, so that an executor only walks its worker's list.

A lowered list keeps these promises:

* `RECV` posts a receive into a fresh buffer and returns at once. On every channel the receives are posted in the order
  in which the other stage sends, so no tags are needed.
* `WAIT_RECV` stands before the compute that takes the tensor, once for each receive. With the one exception below, no
  other action before the last compute ever waits for another worker.
* Directly after it, before the compute, stand the `RECV`s for the next `lookahead` computes: their messages travel
  while this compute runs. During a compute at most `lookahead` receives are posted and not yet waited for; more only
  if messages overtake each other between two virtual stages that share a channel.
* `SEND` stands directly after the compute that makes the tensor. It returns at once and holds the tensor until its
  `WAIT_SEND`.
* `WAIT_SEND` stands once for each send, at the first point where the messages that this worker has received prove that
  the receiver has waited for the message; so it takes no time. Sends without such a point are drained at the end of
  the list, in the order of posting. In one kind of schedule no message comes back to prove anything: forward only, with
  one virtual stage on each stage. There the waits leave at most `lookahead + 1` sends open, because the receiver
  posts no more receives ahead. Such a wait can take time, but cannot deadlock, because nothing comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Actions,
    Schedule,
    advance_orders,
    by_channel,
    channel_of,
    inputs_of,
    peer_of,
    receives_for,
    sends_after,
    wait_for,
)


def lower(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Return a schedule with all communication; the module's docstring says what it promises.

    Args:
        schedule: Compute only, and free of deadlocks (see :mod:`vtp_plugin.plan.schedule.proof.check_schedule`).
        lookahead: How many computes ahead receives are posted. If a message starts only when its receive is posted
            (gloo, NCCL), the link hides its latency only if the receive is posted that long before the send. With 0
            each is posted when it is needed, as Megatron's own schedules do; that is for simulations.

    Raises:
        ConfigError: `lookahead` is below 0.

    >>> from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)).describe())
    stage 0: 0RECV_B0 0F0 0SEND_F0 0WAIT_RECV_B0 0WAIT_SEND_F0 0B0
    stage 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0
    >>> print(lower(one_f_one_b(2, 1), lookahead=0).describe().splitlines()[0])
    stage 0: 0F0 0SEND_F0 0RECV_B0 0WAIT_RECV_B0 0WAIT_SEND_F0 0B0
    """
    if lookahead < 0:
        raise ConfigError(f"lookahead {lookahead}: receives are posted 0 computes ahead or more")
    placement = schedule.placement
    sent = by_channel(placement, (s for order in schedule.orders for c in order for s in sends_after(placement, c)))
    incoming = {channel: deque(peer_of(placement, send) for send in sends) for channel, sends in sent.items()}
    posts = [_posts(schedule, order, incoming, lookahead) for order in schedule.orders]
    proofs = _proved_sends(schedule, lookahead + 1)
    orders: list[Actions] = []
    for worker, order in enumerate(schedule.orders):
        actions: list[Action] = [*posts[worker][0]] if lookahead else []
        unproved: dict[Action, None] = {}  # an ordered set
        for index, compute in enumerate(order):
            actions += [] if lookahead else posts[worker][index]
            actions += map(wait_for, receives_for(placement, compute))
            actions += posts[worker][index + 1] if lookahead else []
            for send in proofs[worker][index]:
                actions.append(wait_for(send))
                del unproved[send]
            actions.append(compute)
            for send in sends_after(placement, compute):
                actions.append(send)
                unproved[send] = None
        orders.append((*actions, *map(wait_for, unproved)))
    return replace(schedule, orders=tuple(orders))


def _posts(
    schedule: Schedule, order: Actions, incoming: Mapping[ChannelId, deque[Action]], lookahead: int
) -> list[list[Action]]:
    """List the receives that a worker posts: at the start of the step, then before each compute.

    Args:
        schedule: Schedule with the placement.
        order: Order of the worker.
        incoming: Receives that are not posted yet, in the order of the sends, by channel; this worker's are removed.
        lookahead: How many computes ahead receives are posted.
    """
    posted: set[Action] = set()
    posts: list[list[Action]] = [[] for _ in range(len(order) + 1)]
    for index, compute in enumerate(order):
        for receive in receives_for(schedule.placement, compute):
            if receive in posted:
                continue
            # There are no tags: what was sent before it on the channel is received before it, even if needed later.
            queue = incoming[channel_of(schedule.placement, receive)]
            due = [queue.popleft() for _ in range(queue.index(receive) + 1)]
            posted.update(due)
            posts[max(0, index - lookahead + 1) if lookahead else index] += due
    return posts


def _proved_sends(schedule: Schedule, max_unproved: int) -> list[list[list[Action]]]:
    """List, by worker and compute, the sends to wait for right before the compute.

    Every worker keeps a vector clock: how many computes of each worker have started, as far as it can know. A message
    carries the clock of its sender. A send has been received once the compute that takes it has started. Where no
    message comes back, `max_unproved` sends stay open.
    """
    placement, orders = schedule.placement, schedule.orders
    proofs: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
    if schedule.forward_only and placement.num_stages == placement.num_vstages:
        for order, waits in zip(orders, proofs, strict=True):
            for compute, later in zip(order, waits[max_unproved:], strict=False):
                later += sends_after(placement, compute)
        return proofs
    index_of = {action.whole: index for order in orders for index, action in enumerate(order)}
    clocks = [[0] * len(orders) for _ in orders]
    messages: dict[Action, list[int]] = {}
    open_sends: list[list[tuple[int, int, Action]]] = [[] for _ in orders]
    for worker, index in _any_valid_order(schedule):
        compute, clock = orders[worker][index], clocks[worker]
        if receives := receives_for(placement, compute):
            clocks[worker] = clock = [*map(max, clock, *map(messages.pop, receives))]
            proofs[worker][index] = [send for dst, taken, send in open_sends[worker] if clock[dst] > taken]
            open_sends[worker] = [entry for entry in open_sends[worker] if clock[entry[0]] <= entry[1]]
        clock[worker] = index + 1
        for send in sends_after(placement, compute):
            peer = peer_of(placement, send)
            messages[peer] = [*clock]
            taker = Action(op=compute.whole.op, vstage=peer.vstage, microbatch=peer.microbatch)
            dst = placement.worker_of(peer.vstage, peer.microbatch)
            open_sends[worker].append((dst, index_of[taker], send))
    return proofs


def _any_valid_order(schedule: Schedule) -> list[tuple[int, int]]:
    """List `(worker, index)` of all computes, each one after the computes that it needs."""
    done: set[Action] = set()
    numbered = [tuple(enumerate(order)) for order in schedule.orders]
    result: list[tuple[int, int]] = []

    def run(worker: int, entry: tuple[int, Action]) -> bool:
        index, compute = entry
        if not inputs_of(schedule.placement, compute) <= done:
            return False
        done.add(compute.whole)
        result.append((worker, index))
        return True

    if advance_orders(numbered, run) != [*map(len, numbered)]:
        raise PlanError(f"{schedule.name}: deadlock: the orders wait for each other")
    return result
