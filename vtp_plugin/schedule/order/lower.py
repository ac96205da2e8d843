"""Add the communication to an order of compute, so that an executor only walks its worker's list.

What the actions of a lowered list promise to each other:

* `RECV` posts a receive into a fresh buffer and returns at once. On every channel the receives are posted in the order
  in which the other side sends, so no tags are needed.
* `WAIT_RECV` stands before the compute that takes the tensor, once for each receive. With one exception below it is
  the only action before the last compute that may have to wait for another worker.
* Directly after it, before the compute, stand the `RECV`s for the next `lookahead` computes: they are under way while
  this one runs. During a compute at most `lookahead` receives are posted and not waited for; more only where messages
  overtake each other between two virtual stages that share a channel.
* `SEND` stands directly after the compute that makes the tensor. It returns at once and holds the tensor until its
  `WAIT_SEND`.
* `WAIT_SEND` stands once for each send, at the first place where what this worker has received proves that the other
  side has waited for the message; so it takes no time. Sends without such a place are drained at the end of the list,
  in the order of posting. One kind of schedule brings no proof back: forward only with one virtual stage for each
  stage. There a send is waited for so that never more than `lookahead + 1` are open: the other side posts no more
  receives ahead. This can take time, but as nothing comes back it cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import replace

from vtp_plugin.advance import advance_orders
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.layout.channel import ChannelId
from vtp_plugin.schedule.order.actions import Action
from vtp_plugin.schedule.order.messages import (
    channel_of,
    inputs_of,
    peer_of,
    receive_for,
    send_after,
    wait_for,
)
from vtp_plugin.schedule.order.placement import Placement
from vtp_plugin.schedule.order.schedule import Actions, Schedule


def lower(schedule: Schedule, *, lookahead: int = 1) -> Schedule:
    """Return a schedule with all communication; the module's text says what it promises.

    Args:
        schedule: Compute only; its orders must not wait for each other (see :mod:`vtp_plugin.schedule.proof.check`).
        lookahead: For how many computes ahead receives are posted, at least 1. A link whose messages start only when
            the receive is posted (gloo, NCCL) hides its latency if the receive is posted that long before the send.

    Raises:
        ConfigError: `lookahead` is below 1.

    >>> from vtp_plugin.schedule.make.generate import one_f_one_b
    >>> print(lower(one_f_one_b(2, 1)).describe())
    stage 0: 0RECV_B0 0F0 0SEND_F0 0WAIT_RECV_B0 0WAIT_SEND_F0 0B0
    stage 1: 1RECV_F0 1WAIT_RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0
    """
    if lookahead < 1:
        raise ConfigError(f"lookahead {lookahead}: receives are posted at least 1 compute ahead")
    posts = [_posts(schedule, worker, lookahead) for worker in range(len(schedule.orders))]
    proofs = _proved_sends(schedule, lookahead + 1)
    orders: list[Actions] = []
    for worker, order in enumerate(schedule.orders):
        actions: list[Action] = [*posts[worker][0]]
        sent: list[Action] = []
        for index, compute in enumerate(order):
            receive = receive_for(schedule.placement, compute)
            if receive is not None:
                actions.append(wait_for(receive))
            actions += posts[worker][index + 1]
            actions += [wait_for(send) for send in proofs[worker][index]]
            actions.append(compute)
            send = send_after(schedule.placement, compute)
            if send is not None:
                actions.append(send)
                sent.append(send)
        proved = {send for sends in proofs[worker] for send in sends}
        actions += [wait_for(send) for send in sent if send not in proved]
        orders.append(tuple(actions))
    return replace(schedule, orders=tuple(orders))


def _posts(schedule: Schedule, worker: int, lookahead: int) -> list[list[Action]]:
    """List the receives to post: at the start of the step, then before each compute."""
    order = schedule.orders[worker]
    pending = _incoming(schedule, worker)
    posted: set[Action] = set()
    posts: list[list[Action]] = [[] for _ in range(len(order) + 1)]
    for index, compute in enumerate(order):
        receive = receive_for(schedule.placement, compute)
        if receive is None or receive in posted:
            continue
        # Messages that were sent before this one come first on its channel, even if they are needed later.
        queue = pending[channel_of(schedule.placement, receive)]
        due = [queue.popleft() for _ in range(queue.index(receive) + 1)]
        posted.update(due)
        posts[max(0, index - lookahead + 1)] += due
    return posts


def _incoming(schedule: Schedule, worker: int) -> dict[ChannelId, deque[Action]]:
    """Return the receives of a worker by channel, in the order in which the other sides send."""
    incoming: dict[ChannelId, deque[Action]] = defaultdict(deque)
    for order in schedule.orders:
        for compute in order:
            send = send_after(schedule.placement, compute)
            if send is not None:
                channel = channel_of(schedule.placement, send)
                if channel.dst == worker:
                    incoming[channel].append(peer_of(send))
    return incoming


def _proved_sends(schedule: Schedule, max_unproved: int) -> list[list[list[Action]]]:
    """List, by worker and compute, the sends that are to be waited for right before the compute.

    Every worker keeps a clock: how many computes of every worker must have begun, as far as it knows. A message carries
    the clock of its sender, and a send has been received as soon as the compute that takes it has begun. Where no
    message comes back, `max_unproved` sends are left open.
    """
    placement, orders = schedule.placement, schedule.orders
    proofs: list[list[list[Action]]] = [[[] for _ in order] for order in orders]
    if schedule.forward_only and placement.num_stages == placement.num_vstages:
        _limit_sends(placement, orders, proofs, max_unproved)
        return proofs
    index_of = {action: index for order in orders for index, action in enumerate(order)}
    clocks = [[0] * len(orders) for _ in orders]
    messages: dict[Action, list[int]] = {}
    open_sends: list[list[tuple[int, int, Action]]] = [[] for _ in orders]
    for worker, index in _any_valid_order(schedule):
        compute, clock = orders[worker][index], clocks[worker]
        receive = receive_for(placement, compute)
        if receive is not None:
            clocks[worker] = clock = [max(pair) for pair in zip(clock, messages.pop(receive), strict=True)]
            proofs[worker][index] = [send for dst, taken, send in open_sends[worker] if clock[dst] > taken]
            open_sends[worker] = [entry for entry in open_sends[worker] if clock[entry[0]] <= entry[1]]
        clock[worker] = index + 1
        send = send_after(placement, compute)
        if send is not None:
            peer = peer_of(send)
            messages[peer] = [*clock]
            taker = Action(op=compute.op, vstage=peer.vstage, microbatch=peer.microbatch)
            dst = placement.worker_of(peer.vstage, peer.microbatch)
            open_sends[worker].append((dst, index_of[taker], send))
    return proofs


def _limit_sends(
    placement: Placement, orders: tuple[Actions, ...], proofs: list[list[list[Action]]], max_open: int
) -> None:
    for worker, order in enumerate(orders):
        sends = [send_after(placement, compute) for compute in order]
        for index, send in enumerate(sends[:-max_open]):
            if send is not None:
                proofs[worker][index + max_open].append(send)


def _any_valid_order(schedule: Schedule) -> list[tuple[int, int]]:
    """List `(worker, index)` of all computes so that what a compute needs comes before it."""
    last = schedule.placement.num_vstages - 1
    done: set[Action] = set()
    numbered = [tuple(enumerate(order)) for order in schedule.orders]
    result: list[tuple[int, int]] = []

    def run(worker: int, entry: tuple[int, Action]) -> bool:
        index, compute = entry
        if not inputs_of(compute, last) <= done:
            return False
        done.add(compute)
        result.append((worker, index))
        return True

    if advance_orders(numbered, run) != [*map(len, numbered)]:
        raise PlanError(f"{schedule.name}: deadlock: the orders wait for each other")
    return result
