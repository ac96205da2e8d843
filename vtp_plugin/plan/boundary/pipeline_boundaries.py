"""The boundaries of a pipeline: one per pair of neighbouring stages and replica, in one order for all ranks.

Where two stages have different context-parallel sizes, their replicas hold the sequence in different pieces; one
boundary then joins all context-parallel ranks of a data-parallel replica. Where they have different data-parallel
sizes, :class:`~vtp_plugin.plan.layout.replica_map.ReplicaMap` says which replicas a boundary joins: one of each stage,
or in split mode several that hold different samples of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import Endpoint
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import DpMode, ReplicaMap


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBoundary:
    """Two neighbouring stages of one replica, or of several that mix, and how tensors cross between them.

    Attributes:
        upstream: Stage whose output crosses.
        downstream: Stage that takes it as input; 0 for the ring's wrap-around.
        dp_ranks: Data-parallel ranks that the boundary joins, of the upstream and of the downstream stage.
        workers: Numbers of the two joined replicas in their team's schedule, upstream and downstream.
        cp_rank: Context-parallel rank of the replica; None if the sizes differ and the boundary joins all of them.
        src: Ranks of the upstream stage in this replica.
        dst: Ranks of the downstream stage.
        strategy: Key of :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES`.
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
        strategy, _ = rules.choose(layout, upstream, downstream)
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
