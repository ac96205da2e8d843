"""The identity of a channel: who sends, who receives, and in which direction of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.util.text_enum import TextEnum


class Direction(TextEnum):
    """What a channel carries: activations go forward, gradients backward."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelId:
    """One direction between two workers.

    Messages arrive in the order of their sends; there are no tags. Channels sort by upstream worker, then downstream
    worker, then forward before backward, so every rank has them in the same order.

    Attributes:
        src: Worker that sends.
        dst: Worker that receives.
        direction: What it carries: activations or gradients.

    >>> str(ChannelId(src=1, dst=0, direction=Direction.BACKWARD))
    'boundary 0->1, backward'
    """

    src: int
    dst: int
    direction: Direction

    @classmethod
    def between(cls, upstream: int, downstream: int, direction: Direction) -> ChannelId:
        """Return the channel of one direction between the two workers of a boundary.

        >>> ChannelId.between(0, 1, Direction.BACKWARD).src
        1
        """
        src, dst = (upstream, downstream) if direction is Direction.FORWARD else (downstream, upstream)
        return cls(src=src, dst=dst, direction=direction)

    @property
    def upstream(self) -> int:
        """Worker that sends activations and receives gradients."""
        return self.src if self.direction is Direction.FORWARD else self.dst

    @property
    def downstream(self) -> int:
        """Worker that receives activations and sends gradients."""
        return self.dst if self.direction is Direction.FORWARD else self.src

    @property
    def opposite(self) -> ChannelId:
        """The channel of the other direction across the same boundary."""
        other = Direction.BACKWARD if self.direction is Direction.FORWARD else Direction.FORWARD
        return ChannelId(src=self.dst, dst=self.src, direction=other)

    def __lt__(self, other: ChannelId) -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, int, bool]:
        return self.upstream, self.downstream, self.direction is Direction.BACKWARD

    def __str__(self) -> str:
        return f"boundary {self.upstream}->{self.downstream}, {self.direction}"
