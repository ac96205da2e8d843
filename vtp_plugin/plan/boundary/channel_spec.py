"""The channels of a pipeline: one for each boundary, ring and tied weight.

The boundaries of a pipeline: one per pair of neighbouring stages and replica, in one order for all ranks.

Where two stages have different context-parallel sizes, their replicas hold the sequence in different pieces; one
boundary then joins all context-parallel ranks of a data-parallel replica. Where they have different data-parallel
sizes, :class:`~vtp_plugin.plan.layout.replica_map.ReplicaMap` says which replicas a boundary joins: one of each stage,
or in split mode several that hold different samples of a batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind
from vtp_plugin.plan.boundary.endpoint import Endpoint, Shape, Sizes, Widths, number_ranks
from vtp_plugin.plan.boundary.message_kind import HeaderCodec, MessageKind, Whole, plan_header
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES, TransportRules
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction, PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap


@dataclass(frozen=True, kw_only=True)
class ChannelSpec:
    """A channel as data: one direction between two endpoints.

    It knows neither stages, as a :class:`PipelineBoundary` does, nor a shape: :meth:`plan` makes the
    :class:`~vtp_plugin.plan.boundary.boundary_plan.BoundaryPlan` of one tensor.

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


def tied_weight_specs(layout: PipelineLayout, stages: Sequence[int] | None = None) -> tuple[ChannelSpec, ...]:
    """List the channels between the stages that may hold a copy of the word embedding, in one order for all ranks.

    Every replica of a stage receives from one replica of each other stage: the one with the same number, modulo the
    number of replicas there.

    Args:
        layout: stages and ranks of the pipeline.
        stages: stages that may hold a copy, ascending; None for the first and the last.

    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, cp=(1, 2))
    >>> [(spec.src.ranks, spec.dst.ranks) for spec in tied_weight_specs(layout)]
    [((0,), (1,)), ((1,), (0,)), ((0,), (2,))]
    >>> layout = PipelineLayout.from_sizes((1, 1, 1), world_size=3)
    >>> [(spec.src.ranks, spec.dst.ranks) for spec in tied_weight_specs(layout, (0, 1, 2))][2:]
    [((0,), (2,)), ((2,), (0,)), ((1,), (2,)), ((2,), (1,))]
    """
    last = layout.num_stages - 1
    names = {0: "first", last: "last"}
    pairs = list(combinations(stages or (0, last), 2))
    specs = []
    for dp_rank, cp_rank in layout.replicas:
        for src, dst in (way for pair in pairs for way in (pair, pair[::-1])):
            way = f"{names.get(src, f'stage {src}')}->{names.get(dst, f'stage {dst}')}"
            if dp_rank < layout.stages[dst].dp and cp_rank < layout.stages[dst].cp:
                ends = [Endpoint(ranks_by_cp=(_tp_ranks(layout, stage, dp_rank, cp_rank),)) for stage in (src, dst)]
                name = f"tied embedding, {way}, replica dp {dp_rank} cp {cp_rank}"
                spec = ChannelSpec(
                    name=name,
                    src=ends[0],
                    dst=ends[1],
                    strategy="sliced",
                    unit="step",
                    kind=MessageKind.TIED_EMBEDDING,
                )
                specs.append(spec)
    return tuple(specs)


def _tp_ranks(layout: PipelineLayout, stage: int, dp_rank: int, cp_rank: int) -> tuple[int, ...]:
    grid = layout.stages[stage]
    return layout.tp_ranks(stage, dp_rank % grid.dp, cp_rank % grid.cp)


@dataclass(frozen=True, kw_only=True)
class PipelineBoundary:
    """Two neighbouring stages of one replica, or of several that mix, and how tensors cross between them.

    It is a place in a pipeline, with both directions; each of these is a :class:`ChannelSpec`, which knows no stages.

    Attributes:
        upstream: Stage whose output crosses.
        downstream: Stage that takes it as input; 0 for the ring's wrap-around.
        dp_ranks: Data-parallel ranks that the boundary joins, of the upstream and of the downstream stage.
        workers: Numbers of the two joined replicas in their team's schedule, upstream and downstream.
        cp_rank: Context-parallel rank of the replica; None if the sizes differ and the boundary joins all of them.
        src: Ranks of the upstream stage in this replica.
        dst: Ranks of the downstream stage.
        strategy: Key of :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES`.
        reason: Why it was chosen, for people.
        is_single: Whether the boundary joins all ranks of both stages. Others have the replica in their name.
        tensor_bytes: Size of the whole tensor that crosses; None if it is not known beforehand.
        rivals: Strategies that a run tries as well at its start.
    """

    upstream: int
    downstream: int
    dp_ranks: tuple[tuple[int, ...], tuple[int, ...]]
    workers: tuple[int, int]
    cp_rank: int | None
    src: Endpoint
    dst: Endpoint
    strategy: str
    reason: str = ""
    is_single: bool = True
    tensor_bytes: int | None = None
    rivals: tuple[str, ...] = ()

    def channel(self, direction: Direction) -> ChannelSpec:
        """Return the channel of one direction; both directions use the same strategy."""
        ends = (self.src, self.dst) if direction is Direction.FORWARD else (self.dst, self.src)
        kind = MessageKind.ACTIVATION if direction is Direction.FORWARD else MessageKind.GRADIENT
        return ChannelSpec(
            name=self.name(direction),
            src=ends[0],
            dst=ends[1],
            strategy=self.strategy,
            kind=kind,
            tensor_bytes=self.tensor_bytes,
            rivals=self.rivals,
        )

    @functools.cached_property
    def forward(self) -> BoundaryPlan:
        """Plan of a small tensor forward; its ranks and links are those of every tensor."""
        return self.channel(Direction.FORWARD).probe

    @property
    def is_wrap(self) -> bool:
        """Whether it leads from the last stage back to the first."""
        return self.downstream < self.upstream

    def id(self, direction: Direction) -> ChannelId:
        """Return the identity of one direction, which is unique on each rank."""
        return ChannelId.between(*self.workers, direction)

    @property
    def replica_name(self) -> str:
        """Name the replica for people: `replica dp 0 cp 1`, `replica dp 0->1 cp 0`, or `replica dp 0, all cp ranks`."""
        names = ["+".join(map(str, ranks)) for ranks in self.dp_ranks]
        dp = names[0] if self.dp_ranks[0] == self.dp_ranks[1] else "->".join(names)
        return f"replica dp {dp}" + (", all cp ranks" if self.cp_rank is None else f" cp {self.cp_rank}")

    def name(self, direction: Direction) -> str:
        """Name boundary and direction as error messages do: `boundary 0->1, forward`."""
        replica = "" if self.is_single else f", {self.replica_name}"
        return f"boundary {self.upstream}->{self.downstream}{replica}, {direction}"


def pipeline_boundaries(
    layout: PipelineLayout, *, is_ring: bool, rules: TransportRules | None = None, dp_mode: DpMode = DpMode.MULTIPLEX
) -> tuple[PipelineBoundary, ...]:
    """List all boundaries in the order in which every rank opens and warms up their channels.

    Args:
        layout: Stages and ranks of the pipeline.
        is_ring: Whether the last stage sends to the first, because of virtual stages.
        rules: Choice of the strategies; the default is the automatic choice inside one site.
        dp_mode: How stages of different data-parallel sizes work together.

    >>> layout = PipelineLayout.from_sizes((1, 2), world_size=3)
    >>> [(b.upstream, b.downstream, b.src.ranks, b.dst.ranks) for b in pipeline_boundaries(layout, is_ring=True)]
    [(0, 1, (0,), (1, 2)), (1, 0, (1, 2), (0,))]
    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, cp=(1, 2))
    >>> [(b.cp_rank, b.src.ranks_by_cp, b.dst.ranks_by_cp) for b in pipeline_boundaries(layout, is_ring=False)]
    [(None, ((0,),), ((1,), (2,)))]
    >>> layout = PipelineLayout.from_sizes((1, 1), world_size=3, dp=(1, 2))
    >>> [b.name(Direction.FORWARD) for b in pipeline_boundaries(layout, is_ring=False)]
    ['boundary 0->1, replica dp 0 cp 0, forward', 'boundary 0->1, replica dp 0->1 cp 0, forward']

    Raises:
        ConfigError: The rules do not fit a boundary. Whether a run's replicas fit together says
            :meth:`~vtp_plugin.plan.layout.replica_map.ReplicaMap.check`.
    """
    rules = rules or TransportRules()
    replicas = ReplicaMap(dp_sizes=layout.dp_sizes, mode=dp_mode)
    num_stages = layout.num_stages
    num_boundaries = num_stages if is_ring and num_stages > 1 else num_stages - 1
    pairs = [(upstream, (upstream + 1) % num_stages) for upstream in range(num_boundaries)]
    boundaries = []
    for upstream, downstream in pairs:
        strategy, reason = rules.choose(layout, upstream, downstream)
        src, dst = layout.stages[upstream], layout.stages[downstream]
        tensor_bytes = _whole_bytes(layout, replicas, rules.tensor_bytes, upstream, downstream)
        joined = [*replicas.joined(upstream, downstream)]
        cp_ranks = [*range(src.cp)] if src.cp == dst.cp else [None]
        for dp_ranks in joined:
            for cp_rank in cp_ranks:
                boundaries.append(
                    PipelineBoundary(
                        upstream=upstream,
                        downstream=downstream,
                        dp_ranks=dp_ranks,
                        workers=(
                            replicas.worker(upstream, dp_ranks[0][0]),
                            replicas.worker(downstream, dp_ranks[1][0]),
                        ),
                        cp_rank=cp_rank,
                        src=_endpoint(layout, upstream, dp_ranks[0], cp_rank),
                        dst=_endpoint(layout, downstream, dp_ranks[1], cp_rank),
                        strategy=strategy,
                        reason=reason,
                        is_single=len(joined) * len(cp_ranks) == 1,
                        tensor_bytes=tensor_bytes,
                        rivals=rules.rivals(layout, upstream, downstream),
                    )
                )
    return tuple(boundaries)


def _whole_bytes(
    layout: PipelineLayout, replicas: ReplicaMap, tensor_bytes: int | None, upstream: int, downstream: int
) -> int | None:
    """Return the bytes that cross a boundary at once: narrower stages exchange longer pieces, or more samples."""
    if tensor_bytes is None:
        return None
    src, dst = layout.stages[upstream], layout.stages[downstream]
    num_chunks = src.cp if src.cp == dst.cp else 1
    samples = max(layout.dp_sizes) // min(src.dp, dst.dp) if replicas.is_split else 1
    return tensor_bytes * max(layout.cp_sizes) // num_chunks * samples


def _endpoint(layout: PipelineLayout, stage: int, dp_ranks: tuple[int, ...], cp_rank: int | None) -> Endpoint:
    """Return the endpoint of a stage in some replicas, with one cp rank or with all."""
    cp_ranks = range(layout.stages[stage].cp) if cp_rank is None else (cp_rank,)
    rows = tuple(layout.tp_ranks(stage, dp_rank, c) for dp_rank in dp_ranks for c in cp_ranks)
    return Endpoint(ranks_by_cp=rows, num_replicas=len(dp_ranks))
