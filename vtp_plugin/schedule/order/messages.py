"""Which messages the computes of a schedule need, and on which channel each one goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from vtp_plugin.layout.channel import ChannelId, Direction
from vtp_plugin.schedule.order.actions import Action, Op
from vtp_plugin.schedule.order.placement import Placement


def channels(placement: Placement) -> tuple[ChannelId, ...]:
    """List all channels: for each pair of workers the forward one, then the backward one.

    >>> from vtp_plugin.schedule.order.placement import plain_placement
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

    >>> from vtp_plugin.schedule.order.placement import plain_placement
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

    >>> from vtp_plugin.schedule.order.actions import parse_action
    >>> from vtp_plugin.schedule.order.placement import u_placement
    >>> [str(channel_of(u_placement(3), parse_action(text))) for text in ("3RECV_F0", "2RECV_B0")]
    ['boundary 2->0, forward', 'boundary 2->0, backward']
    """
    upstream = link_of(action)
    return ChannelId.between(
        placement.worker_of(upstream, action.microbatch),
        placement.worker_of(upstream + 1, action.microbatch),
        Direction.BACKWARD if action.op.is_backward else Direction.FORWARD,
    )


def by_channel(placement: Placement, actions: Iterable[Action]) -> dict[ChannelId, list[Action]]:
    """Group sends, or receives, by their channel, in the given order."""
    groups: dict[ChannelId, list[Action]] = defaultdict(list)
    for action in actions:
        groups[channel_of(placement, action)].append(action)
    return groups


def link_of(action: Action) -> int:
    """Return v if a message passes between the virtual stages v and v + 1.

    Args:
        action: Its send or its receive, or the wait for one of them.
    """
    # Activations are received, and gradients sent, at the end of the link that is farther along the model.
    is_at_far_end = (action.op in _SENDS) == action.op.is_backward
    return action.vstage - 1 if is_at_far_end else action.vstage


def inputs_of(compute: Action, last_vstage: int) -> set[Action]:
    """Return the computes whose results a compute takes as its input.

    >>> from vtp_plugin.schedule.order.actions import parse_action
    >>> sorted(map(str, inputs_of(parse_action("1B0"), 2)))
    ['1F0', '2B0']
    """
    v = compute.vstage
    needed = [(Op.F, v - 1)] if compute.op is Op.F else [(Op.F, v), (Op.B, v + 1)]
    return {Action(op=op, vstage=w, microbatch=compute.microbatch) for op, w in needed if 0 <= w <= last_vstage}


def receive_for(placement: Placement, compute: Action) -> Action | None:
    """Return the receive of a compute's input; None if the input is a sample or comes from the same stage."""
    op, link = (Op.RECV_F, compute.vstage - 1) if compute.op is Op.F else (Op.RECV_B, compute.vstage)
    return _with_op(op, compute) if placement.crosses(link) else None


def send_after(placement: Placement, compute: Action) -> Action | None:
    """Return the send of a compute's result; None if the result stays on the stage."""
    op, link = (Op.SEND_F, compute.vstage) if compute.op is Op.F else (Op.SEND_B, compute.vstage - 1)
    return _with_op(op, compute) if placement.crosses(link) else None


def peer_of(action: Action) -> Action:
    """Return the receive that belongs to a send, or the send that belongs to a receive.

    >>> from vtp_plugin.schedule.order.actions import parse_action
    >>> [str(peer_of(parse_action(text))) for text in ("1SEND_F3", "2RECV_F3", "1SEND_B3")]
    ['2RECV_F3', '1SEND_F3', '0RECV_B3']
    """
    link = link_of(action)
    vstage = link if action.vstage == link + 1 else link + 1
    return Action(op=_PEERS[action.op], vstage=vstage, microbatch=action.microbatch)


def wait_for(action: Action) -> Action:
    """Return the wait that completes a send or a receive."""
    return _with_op(_WAITS[action.op], action)


def started_by(wait: Action) -> Action:
    """Return the send or the receive that a wait completes."""
    return _with_op(_STARTS[wait.op], wait)


def _with_op(op: Op, action: Action) -> Action:
    return Action(op=op, vstage=action.vstage, microbatch=action.microbatch)


_SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.WAIT_SEND_F, Op.WAIT_SEND_B})
_PEERS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_WAITS = {op: Op(f"WAIT_{op}") for op in _PEERS}
_STARTS = {wait: start for start, wait in _WAITS.items()}
