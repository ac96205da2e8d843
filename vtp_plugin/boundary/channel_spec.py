"""What a channel is, as data, and its plans: who sends what to whom for a tensor of any shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.plan import STRATEGIES, BoundaryPlan, CollectiveKind, plan_header
from vtp_plugin.boundary.side import Shape, Side, Sizes, number_ranks


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """One direction between two sides: what a channel is, as data.

    Every rank has the specs of all channels, because torch lets all ranks open each group. It plans for its own ones
    only: who takes part in the others follows from the :class:`Prototype` of channels of their sizes.

    Attributes:
        name: Boundary and direction as error messages show them: `boundary 0->1, forward`.
        src: Side that sends.
        dst: Side that receives.
        strategy: Key of :data:`~vtp_plugin.boundary.plan.STRATEGIES`.
        unit: What the running number of a message counts, for error messages.
        cargo: What its messages are, headers apart.
        tensor_bytes: Size of the whole tensor of a message; None where it is not known beforehand.
    """

    name: str
    src: Side
    dst: Side
    strategy: str
    unit: str = "microbatch"
    cargo: Cargo = Cargo.ACTIVATION
    tensor_bytes: int | None = None

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Plan one exchange of a tensor of a global shape.

        Args:
            shape: Of the whole tensor, such as `[S, B, H]`.
            src_sharded: The sending ranks hold slices of the first dimension, not copies.
            dst_sharded: The receiving ranks want slices.

        Raises:
            ConfigError: The sequence does not divide, or the strategy cannot carry it.
        """
        src, dst = self.src.spread(shape, is_sharded=src_sharded), self.dst.spread(shape, is_sharded=dst_sharded)
        return STRATEGIES[self.strategy](src, dst)

    @functools.cached_property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides everywhere: tells which ranks take part, and their links."""
        rows = math.lcm(*(2 * side.num_parts(is_sharded=True) for side in (self.src, self.dst)))
        return self.plan((rows, math.lcm(self.src.num_replicas, self.dst.num_replicas), 1))

    @property
    def prototype(self) -> Prototype:
        """What the channels of equal sizes have in common."""
        return _prototype(self.strategy, self.src.sizes, self.dst.sizes)

    @property
    def largest_message_bytes(self) -> int | None:
        """Size of the largest message between two ranks, for buffers of the backend; None if no size is known.

        As if the ranks could cut the tensor evenly. Sequence parallelism, where both sides have one size, and shorter
        sequences make it smaller; a longer sequence than `tensor_bytes` tells of goes through such a buffer in parts.

        >>> sides = Side(ranks_by_cp=((0, 1),)), Side(ranks_by_cp=((2, 3, 4),))
        >>> spec = ChannelSpec(name="0->1", src=sides[0], dst=sides[1], strategy="sliced", tensor_bytes=6 << 20)
        >>> spec.largest_message_bytes >> 20
        2
        """
        if self.tensor_bytes is None:
            return None
        largest, whole = self.prototype.largest_of_whole
        return -(-largest * self.tensor_bytes // whole)

    def plan_header(self, length: int) -> BoundaryPlan:
        """Plan how a small vector reaches every receiving rank."""
        return plan_header(self.probe, length)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of both sides, in the plan's order; each has the channel."""
        return self.src.ranks + self.dst.ranks

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending: the members of the channel's group."""
        return tuple(sorted(self._members_at(self.prototype.participants)))

    @property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of the receiving side that complete their copies by an all-gather; empty where none do."""
        return tuple(map(self._members_at, self.prototype.gathering_groups))

    def _members_at(self, places: Sequence[int]) -> tuple[int, ...]:
        members = self.members
        return tuple([members[place] for place in places])


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """What channels have in common whose sides have equal sizes, such as those of the replicas of one boundary.

    Planners go by the places of ranks, never by their numbers, so a plan for the ranks 0, 1, ... is the plan of every
    such channel: its rank `i` stands for the `i`-th of the channel's members. What is proved of it is proved of all.

    Attributes:
        plan: The probe of these ranks.

    >>> sides = Side(ranks_by_cp=((6, 7),)), Side(ranks_by_cp=((9,),))
    >>> spec = ChannelSpec(name="0->1", src=sides[0], dst=sides[1], strategy="rank0")
    >>> str(spec.prototype.plan.transfers[0]), str(spec.probe.transfers[0])
    ('0 -> 2 [0:4, 0:1, 0:1]', '6 -> 9 [0:4, 0:1, 0:1]')
    """

    plan: BoundaryPlan

    @functools.cached_property
    def participants(self) -> tuple[int, ...]:
        """Places of the ranks that send or receive a transfer."""
        return self.plan.participants

    @functools.cached_property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Places of the ranks that complete their copies by an all-gather."""
        return self.plan.finish.groups if self.plan.finish.kind is CollectiveKind.ALL_GATHER else ()

    @functools.cached_property
    def largest_of_whole(self) -> tuple[int, int]:
        """Elements of the largest message, and of the tensor."""
        largest = max(transfer.num_elements for transfer in self.plan.transfers)
        return largest, math.prod(self.plan.src.shape)


@functools.cache
def _prototype(strategy: str, src: Sizes, dst: Sizes) -> Prototype:
    sides = number_ranks(src, first=0), number_ranks(dst, first=src[0] * src[1])
    return Prototype(plan=ChannelSpec(name="prototype", src=sides[0], dst=sides[1], strategy=strategy).probe)


def distinct_plans(specs: Sequence[ChannelSpec], *, header_length: int) -> Iterator[BoundaryPlan]:
    """Yield each plan that channels carry out once, whatever their ranks: for a tensor, then for a header."""
    for prototype in {id(spec.prototype): spec.prototype for spec in specs}.values():
        yield prototype.plan
        yield plan_header(prototype.plan, header_length)
