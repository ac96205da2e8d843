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
    """A channel as data: one direction between two endpoints.

    Every rank has the specs of all channels, because in torch all ranks take part in opening each group. But it makes
    plans only for the channels that it uses: the :attr:`prototype` says who takes part in the others.

    Attributes:
        name: Boundary and direction for error messages: `boundary 0->1, forward`.
        src: Ranks that send.
        dst: Ranks that receive.
        strategy: Key of :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES`.
        unit: What messages are counted in, for error messages: `microbatch 3`.
        kind: Kind of the messages, apart from headers.
        tensor_bytes: Size of the whole tensor of a message; None if it is not known beforehand.
        rivals: Strategies that a run may take instead, over the same groups.
    """

    name: str
    src: Endpoint
    dst: Endpoint
    strategy: str
    unit: str = "microbatch"
    kind: MessageKind = MessageKind.ACTIVATION
    tensor_bytes: int | None = None
    rivals: tuple[str, ...] = ()

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Plan how one tensor crosses.

        Args:
            shape: Shape of the whole tensor, such as `[S, B, H]`.
            src_sharded: The sending ranks hold slices of the first dimension, not copies.
            dst_sharded: The receiving ranks want slices.

        Raises:
            ConfigError: The sequence does not divide evenly, or the strategy cannot carry the tensor.
        """
        src, dst = self.src.sharding(shape, is_sharded=src_sharded), self.dst.sharding(shape, is_sharded=dst_sharded)
        return STRATEGIES[self.strategy].plan(src, dst)

    @functools.cached_property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides evenly everywhere; its ranks and links are those of every tensor."""
        rows = math.lcm(*(2 * endpoint.num_parts(is_sharded=True) for endpoint in (self.src, self.dst)))
        return self.plan((rows, math.lcm(self.src.num_replicas, self.dst.num_replicas), 1))

    @property
    def prototype(self) -> BoundaryPlan:
        """Plan of the probe between the ranks 0, 1, ...; all channels whose endpoints have equal sizes share it.

        Planners go by the positions of ranks, never by their numbers, so rank `i` of the prototype stands for the
        `i`-th member of the channel. What is proved of the prototype is proved of all these channels.

        >>> endpoints = Endpoint(ranks_by_cp=((6, 7),)), Endpoint(ranks_by_cp=((9,),))
        >>> spec = ChannelSpec(name="0->1", src=endpoints[0], dst=endpoints[1], strategy="rank0")
        >>> str(spec.prototype.transfers[0]), str(spec.probe.transfers[0])
        ('0 -> 2 [0:4, 0:1, 0:1]', '6 -> 9 [0:4, 0:1, 0:1]')
        """
        return _prototype(self.strategy, self.src.sizes, self.dst.sizes).probe

    @property
    def largest_message_bytes(self) -> int | None:
        """Size of the largest message between two ranks, by any strategy, for buffers; None if no size is known.

        This assumes that the ranks can cut the tensor evenly. Messages are smaller under sequence parallelism between
        equal stages, and with shorter sequences. A longer sequence than `tensor_bytes` allows for goes through such a
        buffer in parts.

        >>> src, dst = Endpoint(ranks_by_cp=((0, 1),)), Endpoint(ranks_by_cp=((2, 3, 4),))
        >>> spec = ChannelSpec(name="0->1", src=src, dst=dst, strategy="sliced", tensor_bytes=6 << 20)
        >>> spec.largest_message_bytes >> 20
        2
        """
        if self.tensor_bytes is None:
            return None
        strategies = (self.strategy, *self.rivals)
        probes = [_prototype(strategy, self.src.sizes, self.dst.sizes).probe for strategy in strategies]
        return max(-(-one.largest_transfer * self.tensor_bytes // math.prod(one.src.shape)) for one in probes)

    def plan_header(self, length: int) -> BoundaryPlan:
        """Plan how a vector of `length` elements reaches every receiving rank, from every replica that sends to it."""
        return plan_header(self.probe, length, self.src.shares)

    def header_codec(self, rank: int) -> HeaderCodec:
        """Return the codec that writes and reads the headers of a rank of this channel."""
        return HeaderCodec()

    def crossing(self, whole: Whole) -> tuple[Shape, Widths | None]:
        """Return the shape that a tensor's plan is made for, and the length of each unit of its second dimension.

        Args:
            whole: Description of the whole tensor; here its shape.
        """
        return whole, None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of both endpoints, in the order of the plan."""
        return self.src.ranks + self.dst.ranks

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending: the members of the channel's group."""
        return tuple(sorted(self._members_at(self.prototype.participants)))

    @property
    def gathering_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of receiving ranks that complete their copies by an all-gather; empty if the plan has none."""
        finish = self.prototype.finish
        return tuple(map(self._members_at, finish.groups)) if finish.kind is CollectiveKind.ALL_GATHER else ()

    def _members_at(self, positions: Sequence[int]) -> tuple[int, ...]:
        members = self.members
        return tuple([members[position] for position in positions])


# A run has many replicas but few pairs of sizes: without the cache every replica would cost a plan at start-up.
@functools.cache
def _prototype(strategy: str, src: Sizes, dst: Sizes) -> ChannelSpec:
    endpoints = number_ranks(src, first=0), number_ranks(dst, first=src[0] * src[1])
    return ChannelSpec(name="prototype", src=endpoints[0], dst=endpoints[1], strategy=strategy)


def distinct_plans(specs: Sequence[ChannelSpec]) -> Iterator[BoundaryPlan]:
    """Yield every different prototype of the channels once, each followed by the plan of its header."""
    for prototype in dict.fromkeys(_prototype(spec.strategy, spec.src.sizes, spec.dst.sizes) for spec in specs):
        yield prototype.probe
        yield prototype.plan_header(HeaderCodec().length)
