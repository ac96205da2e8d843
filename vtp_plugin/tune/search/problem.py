"""What is searched: cards in pools, what a stage costs on them, and which shapes a run may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules
from vtp_plugin.tune.cluster.speed import Link, Speed

Objective = Literal["step", "cards"]
"""What is best. ``step``: the shortest step. ``cards``, of one shape: the most cards that work, then the fewest stages,
then the largest sizes; of these the layers with which the busiest stage is as quick as can be, then the shortest step
in Megatron's order. Every site has a stage then, and stages follow the nodes."""


LayerRule = Literal["any", "ends", "equal"]
"""What stages may hold: any layers; equally many between the first and the last, as in Megatron 0.12; all as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePool:
    """Nodes that are alike: in one site, with one kind of card.

    Attributes:
        name: for people.
        rooms: cards of every node; with context parallelism, how often its size goes into them.
        speeds: by tensor-parallel size; a size without one cannot be used.
        inside: between the cards of a node.
        between: between its nodes.
        site: of the nodes; empty where there are none.
        memory_bytes: of a card; None where it does not count.
        card_price: of a card and hour; None where it is not known.
    """

    name: str
    rooms: tuple[int, ...]
    speeds: Mapping[int, Speed]
    inside: Link = Link()
    between: Link = Link()
    site: str = ""
    memory_bytes: int | None = None
    card_price: float | None = None


HeldBytes = Callable[[int, int, int, int, bool, bool, int], int]
"""Bytes of the fullest rank of a stage: its tensor-parallel size, the replicas, its first layer, the first layer behind
it, whether it has the embedding, whether it has the head, the microbatches of which it keeps activations."""

CountedTwice = Callable[[int, int, tuple[tuple[bool, bool], ...]], int]
"""Bytes that a rank holds once for all virtual stages of its stage, though the sum over them counts them for every one:
its tensor-parallel size, the replicas, and of each virtual stage whether it has the embedding, and the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """How a step's samples are shared.

    Attributes:
        num_replicas: of every stage.
        num_microbatches: of a replica.
        micro_batch_size: samples of a microbatch.
        pools: of cards, with what a microbatch of this size costs.
        message_bytes: of an activation, and of its gradient.
        cp: context-parallel size of every stage: cards that a replica has for each of its tensor-parallel ranks.
        held_bytes: of a stage, with microbatches of this size; None where memory does not count.
        counted_twice: of a stage with several virtual stages; None for nothing.
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
    """What is asked.

    Attributes:
        num_layers: of the model.
        shapes: that are possible, all with the same samples in a step.
        least_stages: of the pipeline.
        most_stages: likewise.
        across: between two sites, by their names in order; where none is given, the slower of the pools' own.
        tied_bytes: gradients of weights that the first and the last stage share, which they sum; 0 without such.
        edge: of a U, the site of its first stage.
        around: of a U, the layers of the edge's first and last part; None for others.
        rules: how tensors cross between stages, as a run is told; what is not known before, sites and the size of the
            tensor, follows from the layout. ``auto`` leaves the transport to the search.
        chunks: virtual stages that every stage may have, beside one; not for a U.
        objective: what is best.
        layers: what stages may hold.
        is_stock: steps are Megatron's own: its order, from rank to rank.
        runs_ahead: stages may have more microbatches in flight than in 1F1B: between sites, whose links are slow.
    """

    num_layers: int
    shapes: tuple[BatchSplit, ...]
    least_stages: int
    most_stages: int
    across: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    tied_bytes: int = 0
    edge: str = ""
    around: tuple[int, int] | None = None
    rules: TransportRules = TransportRules()
    chunks: tuple[int, ...] = ()
    objective: Objective = "step"
    layers: LayerRule = "any"
    is_stock: bool = False
    runs_ahead: bool = field(init=False)

    def __post_init__(self) -> None:
        sites = {pool.site for shape in self.shapes for pool in shape.pools}
        object.__setattr__(self, "runs_ahead", len(sites) > 1 and self.objective == "step" and not self.is_stock)
        if not 1 <= self.least_stages <= self.most_stages:
            raise LayoutError(
                f"stages {self.least_stages}:{self.most_stages}; the fewest must be at least 1 and not above the most"
            )


@dataclass(frozen=True, slots=True, order=True)
class StageType:
    """A stage without its layers: which pools its replicas are in, and its tensor-parallel size.

    Attributes:
        places: number of the pool of every replica, ascending.
        tp: tensor-parallel size.
    """

    places: tuple[int, ...]
    tp: int

    @property
    def pools(self) -> tuple[int, ...]:
        """The pools, each once."""
        return tuple(sorted(set(self.places)))
