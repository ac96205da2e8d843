"""Actions of a rank in a step: computes and messages, in an order.

The loop behind every walk over orders: let workers proceed until none can.

Lowering, checking, simulating and replaying orders have this in common: each worker takes the entries of its list one
after another, and stops at an entry that needs something from another worker. What can be taken now can also be taken
later. So the result does not depend on which worker goes first, and a worker that is stuck at the end stays stuck.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.util.text import TextEnum


class Op(TextEnum):
    """Kinds of actions; :mod:`vtp_plugin.plan.schedule.order.add_communication` says what each one promises.

    A backward is whole, `B`, or split in two: `I` gives the gradient of the input, for which the stage before waits,
    and `W`, later, the gradients of the weights, for which nobody waits before the step ends. The letters are those of
    torch's pipeline schedules.
    """

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - torch's name
    W = "W"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    WAIT_RECV_F = "WAIT_RECV_F"
    WAIT_RECV_B = "WAIT_RECV_B"
    WAIT_SEND_F = "WAIT_SEND_F"
    WAIT_SEND_B = "WAIT_SEND_B"

    @cached_property
    def is_compute(self) -> bool:
        """Whether the action computes; all others communicate."""
        return self in (Op.F, Op.B, Op.I, Op.W)

    @cached_property
    def is_backward(self) -> bool:
        """Whether the action belongs to the backward pass, and so is about a gradient, not an activation."""
        return self in (Op.I, Op.W) or self.value.endswith("B")


_TEXT = re.compile(r"(\d+)([A-Z_]+?)(\d+)(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Action:
    """One thing that a stage does for one microbatch.

    Attributes:
        op: What is done.
        vstage: Virtual stage that does it: `1SEND_F3` sends the output of virtual stage 1 to virtual stage 2, where
            `2RECV_F3` receives it; `1SEND_B3` sends the gradient of virtual stage 1's input to virtual stage 0.
        microbatch: Number of the microbatch in the step, from 0. A stage that serves k replicas in turn (unequal data
            parallelism) counts the microbatches of all replicas: number i belongs to replica i mod k.
        source: Virtual stage that the input comes from, for a message at a virtual stage with several inputs:
            `2RECV_F3:0` receives what virtual stage 0 sends, `2SEND_B3:0` sends its gradient back. -1 elsewhere.

    >>> str(Action(op=Op.SEND_F, vstage=1, microbatch=3)), str(Action(op=Op.RECV_F, vstage=2, microbatch=3, source=0))
    ('1SEND_F3', '2RECV_F3:0')
    """

    op: Op
    vstage: int
    microbatch: int
    source: int = -1

    @property
    def whole(self) -> Action:
        """What this compute is to those who wait for its result: an `I` gives them the same as a whole `B`.

        >>> str(parse_action("1I3").whole), str(parse_action("1W3").whole)
        ('1B3', '1W3')
        """
        return replace(self, op=Op.B) if self.op is Op.I else self

    def __str__(self) -> str:
        return f"{self.vstage}{self.op}{self.microbatch}" + ("" if self.source < 0 else f":{self.source}")


def parse_action(text: str) -> Action:
    """Read the text form of an action.

    Raises:
        ConfigError: The text is not of this form.

    >>> parse_action("0RECV_B2")
    Action(op=<Op.RECV_B: 'RECV_B'>, vstage=0, microbatch=2, source=-1)
    """
    match = _TEXT.fullmatch(text)
    if match is None or match[2] not in Op.__members__:
        raise ConfigError(f"{text!r} is no action: write virtual stage, operation, microbatch, such as 2F0 or 1SEND_B3")
    source = -1 if match[4] is None else int(match[4])
    return Action(op=Op(match[2]), vstage=int(match[1]), microbatch=int(match[3]), source=source)


def format_actions(actions: tuple[Action, ...]) -> str:
    """Write actions in one line; inverse of :func:`parse_actions`.

    >>> format_actions(parse_actions("0F0 0F1 0B0"))
    '0F0 0F1 0B0'
    """
    return " ".join(str(action) for action in actions)


def parse_actions(text: str) -> tuple[Action, ...]:
    """Read actions that are separated by white space."""
    return tuple(parse_action(word) for word in text.split())


def channel_label(placement: Placement, channel: ChannelId) -> str:
    """Name a channel for a reader: by stages and replicas if there are replicas, otherwise as `str` does.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2))
    >>> channel_label(placement, ChannelId.between(0, 2, Direction.FORWARD))
    'boundary stage 0->stage 1 replica 1, forward'
    """
    if placement.num_workers == placement.num_stages:
        return str(channel)
    ends = f"{placement.label(channel.upstream)}->{placement.label(channel.downstream)}"
    return f"boundary {ends}, {channel.direction}"


def channel_of(placement: Placement, action: Action) -> ChannelId:
    """Return the channel of a send or a receive.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> [str(channel_of(u_placement(3), parse_action(text))) for text in ("3RECV_F0", "2RECV_B0")]
    ['boundary 2->0, forward', 'boundary 2->0, backward']
    """
    upstream = crossing_output(placement, action)
    return ChannelId.between(
        placement.worker_of(upstream, action.microbatch),
        placement.worker_of(placement.successors[upstream], action.microbatch),
        Direction.BACKWARD if action.op.is_backward else Direction.FORWARD,
    )


def by_channel(placement: Placement, actions: Iterable[Action]) -> dict[ChannelId, list[Action]]:
    """Group sends, or receives, by their channel, in the given order."""
    groups: dict[ChannelId, list[Action]] = defaultdict(list)
    for action in actions:
        groups[channel_of(placement, action)].append(action)
    return groups


def crossing_output(placement: Placement, action: Action) -> int:
    """Return v if a message passes between the virtual stage v and its successor.

    Args:
        placement: Which virtual stage follows on which.
        action: Its send or its receive, or the wait for one of them.
    """
    # Activations are received, and gradients sent, at the end of the link that is farther along the model.
    is_at_far_end = (action.op in _SENDS) == action.op.is_backward
    if not is_at_far_end:
        return action.vstage
    return placement.predecessors(action.vstage)[0] if action.source < 0 else action.source


def inputs_of(placement: Placement, compute: Action) -> set[Action]:
    """Return the computes whose results a compute takes as its input.

    A gradient comes from a `B`, which may be split: the result names it as :attr:`Action.whole` does.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> sorted(map(str, inputs_of(plain_placement(3), parse_action("1B0"))))
    ['1F0', '2B0']
    >>> [str(one) for one in inputs_of(plain_placement(3), parse_action("1W0"))]
    ['1B0']
    >>> two_encoders = Placement(stages=(0, 1, 2), successors=(2, 2))
    >>> sorted(map(str, inputs_of(two_encoders, parse_action("2F0"))))
    ['0F0', '1F0']
    """
    v = compute.vstage
    if compute.op is Op.F:
        needed = [(Op.F, before) for before in placement.predecessors(v)]
    elif compute.op is Op.W:
        needed = [(Op.B, v)]
    else:
        needed = [(Op.F, v), *((Op.B, after) for after in placement.successors[v : v + 1])]
    return {Action(op=op, vstage=w, microbatch=compute.microbatch) for op, w in needed}


def joint_with(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the computes of other workers that are one joint compute with this one; most have none.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2), joint=((1, 1), (2, 1)))
    >>> [[str(one) for one in joint_with(placement, parse_action(text))] for text in ("1F3", "1B3")]
    [['1F2'], []]
    """
    if compute.op is Op.W:
        return ()
    together = placement.joint_microbatches(compute.vstage, compute.microbatch, is_backward=compute.op.is_backward)
    return tuple(
        Action(op=compute.op, vstage=compute.vstage, microbatch=h) for h in together if h != compute.microbatch
    )


def receives_for(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the receives of a compute's inputs; none if they are samples or come from the same stage.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> [str(one) for one in receives_for(Placement(stages=(0, 1, 2), successors=(2, 2)), parse_action("2F0"))]
    ['2RECV_F0:0', '2RECV_F0:1']
    """
    if compute.op is Op.F:
        return _at_inputs(placement, Op.RECV_F, compute)
    if compute.op is Op.W:
        return ()
    return (_with_op(Op.RECV_B, compute),) if placement.crosses(compute.vstage) else ()


def sends_after(placement: Placement, compute: Action) -> tuple[Action, ...]:
    """Return the sends of a compute's results; none if they stay on the stage."""
    if compute.op is Op.W:
        return ()
    if compute.op.is_backward:
        return _at_inputs(placement, Op.SEND_B, compute)
    return (_with_op(Op.SEND_F, compute),) if placement.crosses(compute.vstage) else ()


def peer_of(placement: Placement, action: Action) -> Action:
    """Return the receive that belongs to a send, or the send that belongs to a receive.

    >>> from vtp_plugin.plan.schedule.order.actions import parse_action
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> [str(peer_of(plain_placement(3), parse_action(text))) for text in ("1SEND_F3", "2RECV_F3", "1SEND_B3")]
    ['2RECV_F3', '1SEND_F3', '0RECV_B3']
    """
    link, op = crossing_output(placement, action), _PEERS[action.op]
    if action.vstage != link:
        return Action(op=op, vstage=link, microbatch=action.microbatch)
    after = placement.successors[link]
    source = link if len(placement.predecessors(after)) > 1 else -1
    return Action(op=op, vstage=after, microbatch=action.microbatch, source=source)


def wait_for(action: Action) -> Action:
    """Return the wait that completes a send or a receive."""
    return _with_op(_WAITS[action.op], action)


def started_by(wait: Action) -> Action:
    """Return the send or the receive that a wait completes."""
    return _with_op(_STARTS[wait.op], wait)


def _with_op(op: Op, action: Action) -> Action:
    return Action(op=op, vstage=action.vstage, microbatch=action.microbatch, source=action.source)


def _at_inputs(placement: Placement, op: Op, compute: Action) -> tuple[Action, ...]:
    """List the messages of one kind at all inputs of a compute's virtual stage that come from other stages."""
    v, inputs = compute.vstage, placement.predecessors(compute.vstage)
    return tuple(
        Action(op=op, vstage=v, microbatch=compute.microbatch, source=before if len(inputs) > 1 else -1)
        for before in inputs
        if placement.crosses(before) and (op is not Op.SEND_B or placement.is_trained(before))
    )


_SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.WAIT_SEND_F, Op.WAIT_SEND_B})
_PEERS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_WAITS = {op: Op(f"WAIT_{op}") for op in _PEERS}
_STARTS = {wait: start for start, wait in _WAITS.items()}


Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The orders of all workers for one step: compute only, or lowered, which means with all communication.

    Attributes:
        name: Short name of the kind, such as `1f1b`.
        placement: Which stage holds which virtual stage, and its replicas.
        num_microbatches: Microbatches of the step, numbered from 0; the replicas of a stage share them.
        orders: `orders[worker]` are the actions of a worker, one after the other.
        forward_only: Whether there is no backward pass (evaluation).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Actions, ...]
    forward_only: bool = False

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ when anything but the name differs; ranks compare them."""
        # The numbers of replicas are in it too, in the labels of the orders.
        follows = "" if self.placement.is_chain else f" {self.placement.successors}"
        if any(max(sizes) > 1 for sizes in self.placement.joint):
            follows += f" {self.placement.joint}"
        text = f"{self.placement.stages}{follows} {self.num_microbatches} {self.forward_only}\n{self.describe()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Write one line for each worker, such as `stage 1: 1F0 1B0` or `stage 1 replica 0: 1F0 1F2`."""
        lines = (f"{self.placement.label(worker)}: {format_actions(order)}" for worker, order in enumerate(self.orders))
        return "\n".join(lines)


Entry = TypeVar("Entry")


def advance(num_workers: int, go: Callable[[int], Iterable[int]]) -> None:
    """Let workers proceed until none can.

    Args:
        num_workers: workers are numbered from 0.
        go: lets one worker go as far as it can, and returns the workers that it may have freed: none if it did not
            move; too many do no harm. It is called at least once for each worker, and again when another one names it.
    """
    waiting = deque(range(num_workers))
    is_waiting = [True] * num_workers
    while waiting:
        worker = waiting.popleft()
        is_waiting[worker] = False
        for other in go(worker):
            if other != worker and not is_waiting[other]:
                is_waiting[other] = True
                waiting.append(other)


def advance_orders(orders: Sequence[Sequence[Entry]], take: Callable[[int, Entry], bool]) -> list[int]:
    """Let every worker take the entries of its order, and return how many each has taken.

    Args:
        orders: order of every worker.
        take: takes one entry of a worker; False if the worker has to wait for another one.

    >>> done = set()
    >>> def take(worker, entry):
    ...     return entry - 1 in done | {0} and not done.add(entry)
    >>> advance_orders([[2, 3], [1, 5]], take)
    [2, 1]
    """
    reached = [0] * len(orders)
    everybody = range(len(orders))

    def go(worker: int) -> Iterable[int]:
        order, start = orders[worker], reached[worker]
        while reached[worker] < len(order) and take(worker, order[reached[worker]]):
            reached[worker] += 1
        return everybody if reached[worker] > start else ()

    advance(len(orders), go)
    return reached


def carriers(
    placement: Placement, src: int, dst: Collection[int] | None = None, chunks: Collection[int] | None = None
) -> frozenset[int]:
    """Return the virtual stages with whose output a companion crosses.

    It is read where stage `src` holds a virtual stage, and travels with every activation up to the last stage that
    wants it. Where the model comes back to `src`, that stage reads again, or the companion ends there.

    Args:
        placement: which stage holds which virtual stage; a chain.
        src: stage that reads the companion from its batch.
        dst: stages that want it; None for all others.
        chunks: chunks of stage `src` that read it, such as the one before the second of two rings; None for all.

    Raises:
        PlanError: the virtual stages are no chain, or a stage does not exist.

    >>> from vtp_plugin.plan.schedule.order.placement import interleaved_placement, plain_placement, u_placement
    >>> placements = plain_placement(4), u_placement(3), u_placement(2, num_rings=2)
    >>> [sorted(carriers(placement, 0)) for placement in placements]
    [[0, 1, 2], [0, 1], [0, 2]]
    >>> sorted(carriers(plain_placement(4), 1, {2})), sorted(carriers(interleaved_placement(3, 2), 1, {0}))
    ([1], [1, 2])
    >>> [sorted(carriers(u_placement(3, num_rings=2), 0, chunks={chunk})) for chunk in (0, 1)]
    [[0, 1], [3, 4]]
    """
    stages = placement.stages
    if not placement.is_chain or not {src, *(dst or ())} <= set(stages):
        raise PlanError(
            f"a companion from stage {src} to {dst} over {stages}: these stages are no chain that holds them"
        )
    carrying: set[int] = set()
    behind: list[int] = []
    for vstage, after in enumerate(stages[1:]):
        if stages[vstage] == src:
            behind = [vstage] if chunks is None or placement.chunk(vstage) in chunks else []
        elif behind:
            behind.append(vstage)
        if behind and after != src and (dst is None or after in dst):
            carrying.update(behind)
    return frozenset(carrying)
