"""What is searched, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.read_cluster import CountedTwice, HeldBytes
from vtp_plugin.tune.cluster.speed import Link, Speed, slowest

Objective = Literal["step", "cards"]
"""The objective. ``step``: the shortest step. ``cards``: for each split the most cards used, then the fewest stages,
then the largest sizes; of these the layers with the quickest busiest stage, then the shortest step in Megatron's order;
of the splits the one with the shortest step. Every site has a stage then, and stages are in the order of the nodes."""


LayerRule = Literal["any", "ends", "equal"]
"""How many layers stages may hold. ``any``: any numbers; ``ends``: equally many between the first and the last stage,
as in Megatron 0.12; ``equal``: equally many on all stages."""

NodeIndex = tuple[int, int]
"""A node: the number of its pool, and its own number there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Nodes that are alike: in one site, with one kind of card.

    Attributes:
        name: name for people.
        cards_per_node: number of cards of each node; with context parallelism, divided by its size and rounded down.
        speeds: how fast a stage is, by tensor-parallel size; a size that is missing cannot be used.
        inside: link between the cards of a node.
        between: link between the nodes.
        site: site of the nodes; empty where there are none.
        memory_bytes: memory of a card, in bytes; None for no limit.
        card_price: price of a card for an hour; None where it is not known.
        nodes: the nodes with their names and all their cards; empty where nobody asks for them.
    """

    name: str
    cards_per_node: tuple[int, ...]
    speeds: Mapping[int, Speed]
    inside: Link = Link()
    between: Link = Link()
    site: str = ""
    memory_bytes: int | None = None
    card_price: float | None = None
    nodes: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How the samples of a step are shared out.

    Attributes:
        num_replicas: number of replicas of every stage.
        num_microbatches: number of microbatches of a replica.
        micro_batch_size: number of samples of a microbatch.
        pools: the pools of cards, with what a microbatch of this size costs on them.
        message_bytes: bytes of an activation, and of its gradient.
        cp: context-parallel size of every stage: cards that a replica has for each of its tensor-parallel ranks.
        held_bytes: called for the bytes that a stage holds, with microbatches of this size; None for no limit.
        counted_twice: called for the bytes that a stage with several virtual stages holds once; None for nothing.
    """

    num_replicas: int
    num_microbatches: int
    micro_batch_size: int
    pools: tuple[NodePool, ...]
    message_bytes: int = 0
    cp: int = 1
    held_bytes: HeldBytes | None = None
    counted_twice: CountedTwice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProblem:
    """A search problem.

    Attributes:
        num_layers: number of layers of the model.
        splits: ways to split the batch, all with the same number of samples in a step.
        least_stages: fewest pipeline stages.
        most_stages: most pipeline stages.
        across: link between two sites, by their names in order; where none is given, the slower of the pools' own.
        tied_bytes: bytes of the gradients of weights that the first and the last stage share, which they sum; 0 without
            such.
        edge: site of the edge of a U; empty without a U.
        edge_layers: number of layers of the first and of the last part of a U's edge; None without a U.
        rules: how a run chooses the transport of a boundary; sites and the size of the tensor are filled in for each
            layout. With ``auto`` the search chooses the transport.
        chunks: numbers of virtual stages that every stage may have, beside one; not for a U.
        objective: the objective.
        layers: how many layers stages may hold.
        is_stock: whether steps are stock Megatron's: its order, messages from rank to rank.
        split_backward: whether the layouts that are found may run with split backwards, where that is quicker.
        num_frozen: number of the first layers, which train nothing; a planned order has no backward of a stage with
            such layers alone.
        runs_ahead: whether stages may have more microbatches in flight than in 1F1B: where links between sites are
            slow, and where the first layers have no backward.
    """

    num_layers: int
    splits: tuple[BatchSplit, ...]
    least_stages: int
    most_stages: int
    across: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    tied_bytes: int = 0
    edge: str = ""
    edge_layers: tuple[int, int] | None = None
    rules: TransportRules = TransportRules()
    chunks: tuple[int, ...] = ()
    objective: Objective = "step"
    layers: LayerRule = "any"
    is_stock: bool = False
    split_backward: bool = False
    num_frozen: int = 0
    runs_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        sites = {pool.site for split in self.splits for pool in split.pools}
        gains = len(sites) > 1 or self.num_frozen > 0
        object.__setattr__(self, "runs_ahead", gains and self.objective == "step" and not self.is_stock)
        if not 1 <= self.least_stages <= self.most_stages:
            raise LayoutError(
                f"stages {self.least_stages}:{self.most_stages}; the fewest must be at least 1 and not above the most"
            )


@dataclass(frozen=True, slots=True, order=True)
class StageType:
    """A stage without its layers: which pools its replicas are in, and its tensor-parallel size.

    Attributes:
        replica_pools: number of the pool of every replica, ascending.
        tp: tensor-parallel size of the stage.
    """

    replica_pools: tuple[int, ...]
    tp: int

    @property
    def pools(self) -> tuple[int, ...]:
        """Numbers of the pools, each once."""
        return tuple(sorted(set(self.replica_pools)))


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
