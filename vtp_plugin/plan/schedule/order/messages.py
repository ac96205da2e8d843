"""Which messages the computes of a schedule need, and on which channel each one goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.placement import Placement


def channels(placement: Placement) -> tuple[ChannelId, ...]:
    """List all channels: for each pair of workers the forward one, then the backward one.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> [str(channel) for channel in channels(plain_placement(2, num_replicas=(1, 2)))][1:3]
    ['boundary 0->1, backward', 'boundary 0->2, forward']
    """
    return tuple(
        ChannelId.between(upstream, downstream, direction)
        for upstream, downstream in placement.worker_boundaries
        for direction in Direction
    )


def channel_label(placement: Placement, channel: ChannelId) -> str:
    """Name a channel for a reader: by stages and replicas if there are replicas, otherwise as `str` does.

    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> placement = plain_placement(2, num_replicas=(1, 2))
    >>> channel_label(placement, channels(placement)[2])
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
    upstream = link_of(placement, action)
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


def link_of(placement: Placement, action: Action) -> int:
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
    link, op = link_of(placement, action), _PEERS[action.op]
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
