"""A channel as data, and its plans: who sends what to whom for a tensor of any shape."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind
from vtp_plugin.plan.boundary.endpoint import Endpoint, Shape, Sizes, number_ranks
from vtp_plugin.plan.boundary.header import HeaderCodec, Whole, plan_header
from vtp_plugin.plan.boundary.local_slices import Widths
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """A channel as data: one direction between two sides.

    Every rank has the specs of all channels, because in torch all ranks take part in opening each group. But it makes
    plans only for the channels that it uses: the :attr:`prototype` says who takes part in the others.

    Attributes:
        name: Boundary and direction for error messages: `boundary 0->1, forward`.
        src: Side that sends.
        dst: Side that receives.
        strategy: Key of :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES`.
        unit: What the sequence number of a message counts, for error messages.
        cargo: What the messages are, apart from headers.
        tensor_bytes: Size of the whole tensor of a message; None if it is not known beforehand.
        rivals: Strategies that a run may take instead, over the same groups.
    """

    name: str
    src: Endpoint
    dst: Endpoint
    strategy: str
    unit: str = "microbatch"
    cargo: MessageKind = MessageKind.ACTIVATION
    tensor_bytes: int | None = None
    rivals: tuple[str, ...] = ()

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Plan how one tensor crosses.

        Args:
            shape: Of the whole tensor, such as `[S, B, H]`.
            src_sharded: The sending ranks hold slices of the first dimension, not copies.
            dst_sharded: The receiving ranks want slices.

        Raises:
            ConfigError: The sequence does not divide evenly, or the strategy cannot carry the tensor.
        """
        src, dst = self.src.spread(shape, is_sharded=src_sharded), self.dst.spread(shape, is_sharded=dst_sharded)
        return STRATEGIES[self.strategy].plan(src, dst)

    @functools.cached_property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides evenly everywhere; its ranks and links are those of every tensor."""
        rows = math.lcm(*(2 * side.num_parts(is_sharded=True) for side in (self.src, self.dst)))
        return self.plan((rows, math.lcm(self.src.num_replicas, self.dst.num_replicas), 1))

    @property
    def prototype(self) -> BoundaryPlan:
        """Probe of the ranks 0, 1, ..., which channels whose sides have equal sizes share, such as those of replicas.

        Planners go by the positions of ranks, never by their numbers, so rank `i` of the prototype stands for the
        `i`-th member of the channel. What is proved of the prototype is proved of all these channels.

        >>> sides = Endpoint(ranks_by_cp=((6, 7),)), Endpoint(ranks_by_cp=((9,),))
        >>> spec = ChannelSpec(name="0->1", src=sides[0], dst=sides[1], strategy="rank0")
        >>> str(spec.prototype.transfers[0]), str(spec.probe.transfers[0])
        ('0 -> 2 [0:4, 0:1, 0:1]', '6 -> 9 [0:4, 0:1, 0:1]')
        """
        return _prototype(self.strategy, self.src.sizes, self.dst.sizes).probe

    @property
    def largest_message_bytes(self) -> int | None:
        """Size of the largest message between two ranks, by any strategy, for buffers; None if no size is known.

        This assumes that the ranks can cut the tensor evenly. Messages are smaller under sequence parallelism between
        equal sides, and with shorter sequences; a sequence longer than `tensor_bytes` implies passes such a buffer in
        parts.

        >>> sides = Endpoint(ranks_by_cp=((0, 1),)), Endpoint(ranks_by_cp=((2, 3, 4),))
        >>> spec = ChannelSpec(name="0->1", src=sides[0], dst=sides[1], strategy="sliced", tensor_bytes=6 << 20)
        >>> spec.largest_message_bytes >> 20
        2
        """
        if self.tensor_bytes is None:
            return None
        strategies = (self.strategy, *self.rivals)
        probes = [_prototype(strategy, self.src.sizes, self.dst.sizes).probe for strategy in strategies]
        return max(-(-one.largest_transfer * self.tensor_bytes // math.prod(one.src.shape)) for one in probes)

    def plan_header(self, length: int) -> BoundaryPlan:
        """Plan how a vector of so many elements reaches every receiving rank, from every replica that sends to it."""
        return plan_header(self.probe, length, self.src.shares)

    def header_codec(self, rank: int) -> HeaderCodec:
        """Return what writes and reads the headers of a rank of this channel."""
        return HeaderCodec()

    def crossing(self, whole: Whole) -> tuple[Shape, Widths | None]:
        """Return the shape that the plan of a tensor is made for, and how long the units of its second dimension are.

        Args:
            whole: Describes the whole tensor.
        """
        return whole, None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of both sides, in the order of the plan."""
        return self.src.ranks + self.dst.ranks

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending: the members of the channel's group."""
        return tuple(sorted(self._members_at(self.prototype.participants)))

    @property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of receiving ranks that complete their copies by an all-gather; empty if none do."""
        finish = self.prototype.finish
        return tuple(map(self._members_at, finish.groups)) if finish.kind is CollectiveKind.ALL_GATHER else ()

    def _members_at(self, positions: Sequence[int]) -> tuple[int, ...]:
        members = self.members
        return tuple([members[position] for position in positions])


# A run has many replicas but few pairs of sizes: without the cache every replica would cost a plan at start-up.
@functools.cache
def _prototype(strategy: str, src: Sizes, dst: Sizes) -> ChannelSpec:
    sides = number_ranks(src, first=0), number_ranks(dst, first=src[0] * src[1])
    return ChannelSpec(name="prototype", src=sides[0], dst=sides[1], strategy=strategy)


def distinct_plans(specs: Sequence[ChannelSpec]) -> Iterator[BoundaryPlan]:
    """Yield every different prototype of the channels once, each followed by the plan of its header."""
    for prototype in dict.fromkeys(_prototype(spec.strategy, spec.src.sizes, spec.dst.sizes) for spec in specs):
        yield prototype.probe
        yield prototype.plan_header(HeaderCodec().length)
