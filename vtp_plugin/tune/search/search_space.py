"""The search space: what every part of a search is about, the problem with one split of its batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vtp_plugin.tune.cluster.speed import Link, Speed, slowest
from vtp_plugin.tune.search.problem import BatchSplit, NodeIndex, SearchProblem, StageType


class StageSpeeds(dict[StageType, Speed]):
    """How fast a stage of each type is: as the slowest of its replicas; computed when it is first looked up."""

    def __init__(self, split: BatchSplit) -> None:
        super().__init__()
        self.split = split

    def __missing__(self, stage_type: StageType) -> Speed:
        pools = self.split.pools
        speeds = [pools[pool_index].speeds[stage_type.tp] for pool_index in stage_type.pools]
        speed = self[stage_type] = slowest(speeds, _best_peer_s(stage_type, self.split, speeds[0]))
        return speed


def _best_peer_s(stage_type: StageType, split: BatchSplit, speed: Speed) -> float:
    """Bound from below the seconds of a message between ranks that share experts."""
    if not any(map(any, speed.peer_messages)):
        return 0.0
    pools = [split.pools[pool_index] for pool_index in stage_type.pools]
    replicas = -(-speed.peers // (stage_type.tp * split.cp))
    if replicas == 1:
        return max(pool.inside.time_s(speed.peer_bytes) for pool in pools)
    # Several replicas share experts: they may all be in one node, where one has room for them.
    links = [pool.between for pool in pools]
    links += [pool.inside for pool in pools if max(pool.cards_per_node) >= replicas * stage_type.tp]
    return min(link.time_s(speed.peer_bytes) for link in links)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedEdge:
    """The edge of a U, beside which the layouts of its cloud are searched.

    Attributes:
        whole: the space of the whole pipelines.
        stage_type: type of the edge.
        before_s: seconds of every microbatch before the first stage of the cloud.
        least_s: lower bound on every step, in seconds.
    """

    whole: SearchSpace
    stage_type: StageType
    before_s: float
    least_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSpace:
    """The layouts for one split of the batch; for a U those of its cloud, beside one edge.

    Attributes:
        problem: the search problem; for a U that of its cloud, whose layers are those between the edge's.
        split: how the samples are shared out; for a U as the cloud sees it.
        speeds: how fast a stage of each type is.
        edge: edge of a U; None without one.
        most_held: by stage type the most layers that it has memory for, as far as that was asked for.
    """

    problem: SearchProblem
    split: BatchSplit
    speeds: StageSpeeds
    edge: FixedEdge | None = None
    most_held: dict[StageType, int] = field(default_factory=dict[StageType, int])

    @classmethod
    def of(cls, problem: SearchProblem, split: BatchSplit) -> SearchSpace:
        """Make the space of a problem for one of its splits.

        >>> from vtp_plugin.tune.search.problem import NodePool
        >>> speeds = [Speed(forward_s=(time, time), backward_s=(1, 1)) for time in (1.0, 2.0)]
        >>> pools = tuple(NodePool(name="", cards_per_node=(1,), speeds={1: speed}) for speed in speeds)
        >>> split = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=pools)
        >>> problem = SearchProblem(num_layers=2, splits=(split,), least_stages=1, most_stages=2)
        >>> SearchSpace.of(problem, split).speeds[StageType((0, 1), 1)].forward_s
        (2.0, 2.0)
        """
        return cls(problem=problem, split=split, speeds=StageSpeeds(split))

    @property
    def whole(self) -> SearchSpace:
        """The space of whole pipelines."""
        return self if self.edge is None else self.edge.whole

    @property
    def before_s(self) -> float:
        """Seconds of every microbatch before the first stage of these layouts."""
        return 0.0 if self.edge is None else self.edge.before_s

    @property
    def least_s(self) -> float:
        """Lower bound on every step, in seconds."""
        return 0.0 if self.edge is None else self.edge.least_s

    def whole_stage_types(self, inner: Sequence[StageType]) -> tuple[StageType, ...]:
        """Give the stage types of the whole pipeline, from those of a layout."""
        return tuple(inner) if self.edge is None else (self.edge.stage_type, *inner)

    def whole_layers(self, inner: Sequence[int]) -> tuple[int, ...]:
        """Give the number of layers of each part of the whole pipeline, from those of a layout."""
        if self.edge is None or self.problem.edge_layers is None:
            return tuple(inner)
        first, last = self.problem.edge_layers
        return (first, *inner, last)

    def site(self, stage_type: StageType) -> str:
        """Give the site of a stage, which all its replicas are in."""
        return self.split.pools[stage_type.replica_pools[0]].site

    def memory_bytes(self, stage_type: StageType) -> int | None:
        """Give the memory of the smallest card of a stage, in bytes; None for no limit."""
        known = (self.split.pools[pool_index].memory_bytes for pool_index in stage_type.pools)
        return min((limit for limit in known if limit is not None), default=None)

    def link(self, one: NodeIndex, other: NodeIndex) -> Link:
        """Give the link between two nodes.

        >>> from vtp_plugin.tune.search.problem import NodePool
        >>> pools = (NodePool(name="a", cards_per_node=(1, 1), speeds={}, between=Link(latency_s=1.0)),)
        >>> split = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
        >>> problem = SearchProblem(num_layers=1, splits=(split,), least_stages=1, most_stages=2)
        >>> space = SearchSpace.of(problem, split)
        >>> space.link((0, 0), (0, 0)).latency_s, space.link((0, 0), (0, 1)).latency_s
        (0.0, 1.0)
        """
        pools = self.split.pools
        first, second = pools[one[0]], pools[other[0]]
        if one == other:
            return first.inside
        sites = (first.site, second.site) if first.site <= second.site else (second.site, first.site)
        if sites[0] != sites[1] and sites in self.problem.across:
            return self.problem.across[sites]
        return max(first.between, second.between, key=lambda link: link.time_s(self.split.message_bytes))
