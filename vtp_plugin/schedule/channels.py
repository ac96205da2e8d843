"""Who sends what to whom: the messages that the compute of a schedule needs, and their channels."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.schedule.actions import Action, Op
from vtp_plugin.schedule.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Channel:
    """One direction of one boundary. Messages arrive in the order in which they were sent; there are no tags.

    Attributes:
        upstream: Stage of the boundary that sends activations.
        downstream: Stage that receives them, and sends gradients.
        is_backward: The channel carries gradients, from downstream to upstream.
    """

    upstream: int
    downstream: int
    is_backward: bool

    @property
    def src(self) -> int:
        """Stage that sends."""
        return self.downstream if self.is_backward else self.upstream

    @property
    def dst(self) -> int:
        """Stage that receives."""
        return self.upstream if self.is_backward else self.downstream

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        return f"boundary {self.upstream}->{self.downstream}, {direction}"


def channel_of(placement: Placement, action: Action) -> Channel:
    """Return the channel of a communication, whichever end it is.

    >>> from vtp_plugin.schedule.actions import parse_action
    >>> from vtp_plugin.schedule.placement import u_placement
    >>> [str(channel_of(u_placement(3), parse_action(text))) for text in ("3RECV_F0", "2RECV_B0")]
    ['boundary 2->0, forward', 'boundary 2->0, backward']
    """
    upstream = link_of(action)
    return Channel(
        upstream=placement.stages[upstream],
        downstream=placement.stages[upstream + 1],
        is_backward=action.op.is_backward,
    )


def link_of(action: Action) -> int:
    """Return v where a communication is between the virtual stages v and v + 1."""
    # A forward is received and a backward is sent towards the start of the model.
    is_at_upper_end = (action.op in _SENDS) == action.op.is_backward
    return action.vstage - 1 if is_at_upper_end else action.vstage


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

    >>> from vtp_plugin.schedule.actions import parse_action
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
