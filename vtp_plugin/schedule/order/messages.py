"""Who sends what to whom: the messages that the compute of a schedule needs, and their channels."""

from __future__ import annotations

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
    """Name a channel for a reader; with replicas by its stages and replicas, else as `str` does.

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
    """Return the channel of a communication, whichever end it is.

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


def link_of(action: Action) -> int:
    """Return v where a communication is between the virtual stages v and v + 1."""
    # A forward is received and a backward is sent towards the start of the model.
    is_at_upper_end = (action.op in _SENDS) == action.op.is_backward
    return action.vstage - 1 if is_at_upper_end else action.vstage


def inputs_of(compute: Action, last_vstage: int) -> set[Action]:
    """Return the computes whose results a compute takes directly.

    >>> from vtp_plugin.schedule.order.actions import parse_action
    >>> sorted(map(str, inputs_of(parse_action("1B0"), 2)))
    ['1F0', '2B0']
    """
    v, microbatch = compute.vstage, compute.microbatch
    needed: set[Action] = set()
    if compute.op is Op.F:
        if v > 0:
            needed.add(Action(op=Op.F, vstage=v - 1, microbatch=microbatch))
    else:
        needed.add(Action(op=Op.F, vstage=v, microbatch=microbatch))
        if v < last_vstage:
            needed.add(Action(op=Op.B, vstage=v + 1, microbatch=microbatch))
    return needed


def receive_for(placement: Placement, compute: Action) -> Action | None:
    """Return the receive of the input of a compute, None where it is local or a sample."""
    v = compute.vstage
    is_needed = v + 1 < placement.num_vstages and placement.crosses(v)
    if compute.op is Op.F:
        is_needed = v > 0 and placement.crosses(v - 1)
    op = Op.RECV_F if compute.op is Op.F else Op.RECV_B
    return Action(op=op, vstage=v, microbatch=compute.microbatch) if is_needed else None


def send_after(placement: Placement, compute: Action) -> Action | None:
    """Return the send of the result of a compute, None where it stays on the stage."""
    v = compute.vstage
    is_needed = placement.crosses(v) if compute.op is Op.F else v > 0 and placement.crosses(v - 1)
    op = Op.SEND_F if compute.op is Op.F else Op.SEND_B
    return Action(op=op, vstage=v, microbatch=compute.microbatch) if is_needed else None


def peer_of(action: Action) -> Action:
    """Return the receive of a send, or the send of a receive.

    >>> from vtp_plugin.schedule.order.actions import parse_action
    >>> [str(peer_of(parse_action(text))) for text in ("1SEND_F3", "2RECV_F3", "1SEND_B3")]
    ['2RECV_F3', '1SEND_F3', '0RECV_B3']
    """
    link = link_of(action)
    vstage = link if action.vstage == link + 1 else link + 1
    return Action(op=_PEERS[action.op], vstage=vstage, microbatch=action.microbatch)


def wait_for(action: Action) -> Action:
    """Return the wait that completes a send or a receive."""
    return Action(op=_WAITS[action.op], vstage=action.vstage, microbatch=action.microbatch)


def started_by(wait: Action) -> Action:
    """Return the send or the receive that a wait completes."""
    return Action(op=_STARTS[wait.op], vstage=wait.vstage, microbatch=wait.microbatch)


_SENDS = frozenset({Op.SEND_F, Op.SEND_B, Op.WAIT_SEND_F, Op.WAIT_SEND_B})
_PEERS = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_WAITS = {
    Op.SEND_F: Op.WAIT_SEND_F,
    Op.SEND_B: Op.WAIT_SEND_B,
    Op.RECV_F: Op.WAIT_RECV_F,
    Op.RECV_B: Op.WAIT_RECV_B,
}
_STARTS = {wait: start for start, wait in _WAITS.items()}
