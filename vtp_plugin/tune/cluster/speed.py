"""How fast a kind of card computes layers, and a link carries messages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Source = Literal["measured", "fitted", "data sheet"]
"""Where a time comes from."""


def least_sure(sources: Collection[Source]) -> Source:
    """Choose the source that says least about this machine.

    >>> least_sure({"measured", "fitted"})
    'fitted'
    """
    order: tuple[Source, ...] = ("data sheet", "fitted", "measured")
    return next(source for source in order if source in sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How long the layers of a model take on a stage of one kind of card and one tensor-parallel size.

    Attributes:
        forward_s: seconds of the forward pass of each layer, for one microbatch.
        backward_s: seconds of the backward pass of each layer, for one microbatch.
        first_s: forward and backward seconds of what the first stage has before its layers.
        last_s: forward and backward seconds of what the last stage has behind its layers.
        update_s: seconds of the optimizer in a step, for each layer.
        gradient_bytes: bytes of the gradients of each layer that all replicas sum.
        expert_bytes: bytes of the gradients of each layer's experts that only some of a stage's ranks have copies of.
        source: where the least reliable of these times comes from.
        peers: number of ranks that share experts, which send tokens to each other.
        peer_bytes: bytes of a message between two of these ranks.
        peer_messages: for each layer the number of such messages, one after another, in the forward and in the backward
            pass.
        gather_s: seconds in which the ranks of a stage gather a tensor that crosses a boundary, of which each has a
            part, or in which one of them gathers or scatters it.
        broadcast_s: seconds in which one rank of a stage broadcasts a tensor that crosses a boundary.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    first_s: tuple[float, float] = (0.0, 0.0)
    last_s: tuple[float, float] = (0.0, 0.0)
    update_s: tuple[float, ...] = ()
    gradient_bytes: tuple[int, ...] = ()
    expert_bytes: tuple[int, ...] = ()
    source: Source = "measured"
    peers: int = 1
    peer_bytes: int = 0
    peer_messages: tuple[tuple[int, int], ...] = ()
    gather_s: float = 0.0
    broadcast_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between cards.

    Attributes:
        latency_s: seconds of latency, one way.
        bytes_per_s: bandwidth in each direction.
        at_once: number of cards of a node that can send so fast at the same time; None where that is not known: then a
            tensor takes as long as if one card sent all of it, whatever the transport.
    """

    latency_s: float = 0.0
    bytes_per_s: float = float("inf")
    at_once: int | None = None

    def time_s(self, num_bytes: float) -> float:
        """Say how long a message takes.

        >>> Link(latency_s=0.5, bytes_per_s=8.0).time_s(4)
        1.0
        """
        return self.latency_s + num_bytes / self.bytes_per_s


def all_reduce_s(num_bytes: float, num_ranks: int, link: Link) -> float:
    """Give the seconds of a ring all-reduce.

    >>> all_reduce_s(8, 2, Link(latency_s=0.5, bytes_per_s=4.0)), all_reduce_s(8, 1, Link())
    (3.0, 0.0)
    """
    return 2 * (num_ranks - 1) * link.time_s(num_bytes / num_ranks)
