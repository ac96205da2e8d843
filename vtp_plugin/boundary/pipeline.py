"""The boundaries of a pipeline: one per pair of neighbouring stages and replica, in one order for all ranks.

Where two stages have different context-parallel sizes, their replicas hold the sequence in different pieces; one
boundary then joins all context-parallel ranks of a data-parallel replica. Where they have different data-parallel
sizes, :class:`~vtp_plugin.layout.replicas.ReplicaMap` says which replicas a boundary joins: one of each stage, or in
split mode several that hold different samples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.plan import STRATEGIES, BoundaryPlan, plan_header
from vtp_plugin.boundary.rules import TransportRules
from vtp_plugin.boundary.spread import Box, Holding, Spread, even_cuts, num_rows, rows_of
from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.channel import Direction
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.layout.replicas import DpMode, ReplicaMap

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The ranks of one stage that take part in a boundary, and how they hold a tensor `[S, B, H]`.

    Attributes:
        ranks_by_cp: Global ranks by tensor-parallel rank, for every context-parallel rank that the boundary joins: one
            row where both stages have the same context-parallel size, since their replicas do not mix then. Of
            several replicas the rows of the first one come first.
        num_replicas: Data-parallel replicas that are joined; each holds an even part of the batch.
    """

    ranks_by_cp: tuple[tuple[int, ...], ...]
    num_replicas: int = 1

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, the leader first."""
        return tuple(rank for ranks in self.ranks_by_cp for rank in ranks)

    @property
    def cp(self) -> int:
        """Context-parallel ranks that the boundary joins."""
        return len(self.ranks_by_cp) // self.num_replicas

    def num_parts(self, *, is_sharded: bool) -> int:
        """Count into how many parts the sequence is cut over the ranks.

        >>> side = Side(ranks_by_cp=((0, 1), (2, 3)))
        >>> side.num_parts(is_sharded=False), side.num_parts(is_sharded=True)
        (2, 4)
        """
        return self.cp * (len(self.ranks_by_cp[0]) if is_sharded else 1)

    def whole_shape(self, local: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the whole tensor for the part `[S, B, ...]` of one rank.

        >>> Side(ranks_by_cp=((0,), (1,)), num_replicas=2).whole_shape((8, 2, 4), is_sharded=False)
        (8, 4, 4)
        """
        first, *rest = local
        if self.num_replicas > 1:
            rest[0] *= self.num_replicas
        return (first * self.num_parts(is_sharded=is_sharded), *rest)

    def local_shape(self, whole: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the part of one rank; inverse of :meth:`whole_shape`."""
        first, *rest = whole
        if self.num_replicas > 1:
            rest[0] //= self.num_replicas
        return (first // self.num_parts(is_sharded=is_sharded), *rest)

    def spread(self, shape: Shape, *, is_sharded: bool) -> Spread:
        """Say what each rank holds of a tensor.

        Under context parallelism a rank has a chunk from the front and its counterpart from the back, one behind the
        other (Megatron 0.19, `get_batch_on_this_cp_rank`); sequence parallelism cuts these rows evenly. Replicas have
        the parts of the batch in their order.

        Args:
            shape: Of the whole tensor, the first dimension being the sequence, or the rows of a weight; the second the
                batch, where there are several replicas.
            is_sharded: Tensor-parallel ranks hold slices, not copies (sequence parallelism).

        Raises:
            ConfigError: The sequence does not divide, or the batch.

        >>> Side(ranks_by_cp=((0,), (1,))).spread((8,), is_sharded=False).boxes_of(0)
        (((0, 2),), ((6, 8),))
        """
        cp, tp = self.cp, len(self.ranks_by_cp[0])
        batches = even_cuts(shape[1], self.num_replicas) if self.num_replicas > 1 else ()
        if len({stop - start for start, stop in batches}) > 1:
            raise ConfigError(
                f"batch {shape[1]} cannot be cut for the {self.num_replicas} replicas of ranks {self.ranks}: use "
                f"a multiple of {self.num_replicas}"
            )
        rows = num_rows(_chunks(shape, 0, cp))
        if shape[0] % (2 * cp if cp > 1 else 1) or (is_sharded and rows % tp):
            multiple = (2 * cp if cp > 1 else 1) * (tp if is_sharded else 1)
            raise ConfigError(
                f"sequence length {shape[0]} cannot be cut for ranks {self.ranks} (context-parallel size {cp}, "
                f"tensor-parallel size {tp}{', sequence parallel' if is_sharded else ''}): use a multiple of {multiple}"
            )
        holdings = []
        for row, ranks in enumerate(self.ranks_by_cp):
            replica, cp_rank = divmod(row, cp)
            boxes = _chunks(shape, cp_rank, cp)
            if batches:
                boxes = tuple((box[0], batches[replica], *box[2:]) for box in boxes)
            cuts = even_cuts(rows, tp) if is_sharded else ((0, rows),) * tp
            holdings += [Holding(rank=rank, boxes=rows_of(boxes, *cut)) for rank, cut in zip(ranks, cuts, strict=True)]
        return Spread(shape=shape, holdings=tuple(holdings))


def _chunks(shape: Shape, cp_rank: int, cp: int) -> tuple[Box, ...]:
    """Return what a context-parallel rank holds, in the order of its memory."""
    rest = tuple((0, length) for length in shape[1:])
    if cp == 1:
        return (((0, shape[0]), *rest),)
    chunks = even_cuts(shape[0], 2 * cp)
    return tuple((chunks[index], *rest) for index in (cp_rank, 2 * cp - 1 - cp_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """One direction between two sides: what a channel is, as data.

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

    @property
    def probe(self) -> BoundaryPlan:
        """Plan for a small tensor that divides everywhere: tells which ranks take part, and their links."""
        rows = math.lcm(*(2 * side.num_parts(is_sharded=True) for side in (self.src, self.dst)))
        return self.plan((rows, math.lcm(self.src.num_replicas, self.dst.num_replicas), 1))

    @property
    def largest_message_bytes(self) -> int | None:
        """Size of the largest message between two ranks, for buffers of the backend; None if no size is known.

        As if the ranks could cut the tensor evenly. Sequence parallelism, where both sides have one size, and shorter
        sequences make it smaller; a longer sequence than `tensor_bytes` tells of goes through such a buffer in parts.

        >>> sides = Side(ranks_by_cp=((0, 1),)), Side(ranks_by_cp=((2, 3, 4),))
        >>> channel = ChannelSpec(name="0->1", src=sides[0], dst=sides[1], strategy="sliced", tensor_bytes=6 << 20)
        >>> channel.largest_message_bytes >> 20
        2
        """
        if self.tensor_bytes is None:
            return None
        probe = self.probe
        largest = max(transfer.num_elements for transfer in probe.transfers)
        return -(-largest * self.tensor_bytes // math.prod(probe.src.shape))

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
        return self.probe.participants


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBoundary:
    """Two neighbouring stages of one replica, or of several that mix, and how tensors cross between them.

    Attributes:
        upstream: Stage whose output crosses.
        downstream: Stage that takes it as input; 0 for the ring's wrap-around.
        dp_ranks: Data-parallel ranks of the upstream stage that it joins, and of the downstream stage.
        cp_rank: Context-parallel rank of the replica; None where the stages' sizes differ and it joins all of them.
        src: Ranks of the upstream stage in this replica.
        dst: Ranks of the downstream stage.
        strategy: Key of :data:`~vtp_plugin.boundary.plan.STRATEGIES`.
        is_shared: Ranks of one stage have several such boundaries, one for each replica of the other that they serve.
        tensor_bytes: Size of the whole tensor that crosses; None where it is not known beforehand.
    """

    upstream: int
    downstream: int
    dp_ranks: tuple[tuple[int, ...], tuple[int, ...]]
    cp_rank: int | None
    src: Side
    dst: Side
    strategy: str
    is_shared: bool = False
    tensor_bytes: int | None = None

    def channel(self, direction: Direction) -> ChannelSpec:
        """Give one direction; gradients take the way of :func:`~vtp_plugin.boundary.plan.reversed_plan`."""
        ends = (self.src, self.dst) if direction is Direction.FORWARD else (self.dst, self.src)
        cargo = Cargo.ACTIVATION if direction is Direction.FORWARD else Cargo.GRADIENT
        return ChannelSpec(
            name=self.name(direction),
            src=ends[0],
            dst=ends[1],
            strategy=self.strategy,
            cargo=cargo,
            tensor_bytes=self.tensor_bytes,
        )

    @property
    def replica_name(self) -> str:
        """Name the replica for people: `replica dp 0 cp 1`, `replica dp 0->1 cp 0`, or `replica dp 0, all cp ranks`."""
        names = ["+".join(map(str, ranks)) for ranks in self.dp_ranks]
        dp = names[0] if self.dp_ranks[0] == self.dp_ranks[1] else "->".join(names)
        return f"replica dp {dp}" + (", all cp ranks" if self.cp_rank is None else f" cp {self.cp_rank}")

    def name(self, direction: Direction) -> str:
        """Name boundary and direction as error messages do: `boundary 0->1, forward`; unique on each rank."""
        replica = f", {self.replica_name}" if self.is_shared else ""
        return f"boundary {self.upstream}->{self.downstream}{replica}, {direction}"


def pipeline_boundaries(
    layout: PipelineLayout, *, is_ring: bool, rules: TransportRules | None = None, dp_mode: DpMode = DpMode.MULTIPLEX
) -> tuple[PipelineBoundary, ...]:
    """List all boundaries in the order in which every rank opens and warms up their channels.

    Args:
        layout: Who is where.
        is_ring: Virtual stages let the last stage send to the first.
        rules: How each is crossed; default is the automatic choice inside one site.
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
        ConfigError: Data-parallel sizes do not divide, or the rules do not fit a boundary.
    """
    rules = rules or TransportRules()
    replicas = ReplicaMap(dp_sizes=layout.dp_sizes, mode=dp_mode)
    num_stages = layout.num_stages
    num_boundaries = num_stages if is_ring and num_stages > 1 else num_stages - 1
    pairs = [(upstream, (upstream + 1) % num_stages) for upstream in range(num_boundaries)]
    replicas.check(pairs)
    boundaries = []
    for upstream, downstream in pairs:
        strategy, _ = rules.choose(layout, upstream, downstream)
        src, dst = layout.stages[upstream], layout.stages[downstream]
        for dp_ranks in replicas.joined(upstream, downstream):
            for cp_rank in range(src.cp) if src.cp == dst.cp else (None,):
                boundaries.append(
                    PipelineBoundary(
                        upstream=upstream,
                        downstream=downstream,
                        dp_ranks=dp_ranks,
                        cp_rank=cp_rank,
                        src=_side(layout, upstream, dp_ranks[0], cp_rank),
                        dst=_side(layout, downstream, dp_ranks[1], cp_rank),
                        strategy=strategy,
                        is_shared=src.dp != dst.dp and not replicas.is_split,
                        tensor_bytes=_whole_bytes(layout, replicas, rules.tensor_bytes, upstream, downstream),
                    )
                )
    return tuple(boundaries)


def _whole_bytes(
    layout: PipelineLayout, replicas: ReplicaMap, tensor_bytes: int | None, upstream: int, downstream: int
) -> int | None:
    """Give the size of what crosses one boundary: longer pieces, or more samples, than where the stages are widest."""
    if tensor_bytes is None:
        return None
    src, dst = layout.stages[upstream], layout.stages[downstream]
    num_chunks = src.cp if src.cp == dst.cp else 1
    samples = max(layout.dp_sizes) // min(src.dp, dst.dp) if replicas.is_split else 1
    return tensor_bytes * max(layout.cp_sizes) // num_chunks * samples


def _side(layout: PipelineLayout, stage: int, dp_ranks: tuple[int, ...], cp_rank: int | None) -> Side:
    """Give the ranks of a stage in some replicas, of one cp rank or of all."""
    cp_ranks = range(layout.stages[stage].cp) if cp_rank is None else (cp_rank,)
    rows = tuple(layout.tp_ranks(stage, dp_rank, c) for dp_rank in dp_ranks for c in cp_ranks)
    return Side(ranks_by_cp=rows, num_replicas=len(dp_ranks))
