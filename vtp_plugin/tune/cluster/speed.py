"""What layers cost on a kind of card, and messages on a link."""

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
        forward_s: of every layer, for one microbatch.
        backward_s: likewise.
        first_s: forward and backward of what the first stage has before its layers.
        last_s: likewise of what the last stage has behind them.
        update_s: of every layer, the optimizer's time in a step.
        gradient_bytes: of every layer, what replicas sum.
        expert_bytes: likewise, of experts that only some of a stage's ranks have copies of.
        source: of the time that is least sure.
        peers: ranks that share experts, which send tokens to each other.
        peer_bytes: of a message between two of them.
        peer_messages: of every layer, such messages one after another, in the forward and in the backward pass.
        gather_s: the time in which the ranks of a stage gather the tensor that crosses to the next one, of which each
            has a part, or in which one of them gathers or scatters it.
        broadcast_s: likewise, in which one of them gives it to all.
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
    """What carries messages.

    Attributes:
        latency_s: one way.
        bytes_per_s: in each direction.
        at_once: cards of a node that send so fast at the same time; None where that is not known: then a tensor takes
            as long as if one card sent all of it, whatever way it crosses.
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
    """Say how long a ring all-reduce takes.

    >>> all_reduce_s(8, 2, Link(latency_s=0.5, bytes_per_s=4.0)), all_reduce_s(8, 1, Link())
    (3.0, 0.0)
    """
    return 2 * (num_ranks - 1) * link.time_s(num_bytes / num_ranks)
