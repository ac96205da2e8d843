"""The search problem: cards in pools, what a stage costs on them, and how a batch may be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.cluster.stage_memory import CountedTwice, HeldBytes

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
        runs_ahead: whether stages may have more microbatches in flight than in 1F1B: where links between sites are
            slow.
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
    runs_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        sites = {pool.site for split in self.splits for pool in split.pools}
        object.__setattr__(self, "runs_ahead", len(sites) > 1 and self.objective == "step" and not self.is_stock)
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
