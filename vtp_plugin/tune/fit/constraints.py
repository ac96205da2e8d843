"""What a fit must keep to, and why something does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import LayoutError
from vtp_plugin.host.rules.checks.batch import check_batches
from vtp_plugin.host.rules.checks.divisibility import problems_of_size
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout, RankOrder
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.read_cluster import CountedTwice, HeldBytes
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.search.problem import BatchSplit, LayerRule, NodePool, SearchProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What a layout must satisfy.

    Attributes:
        args: Megatron's parsed arguments, for what they say of the model and of batches.
        least_stages: fewest pipeline stages.
        most_stages: most pipeline stages.
        num_replicas: number of replicas of every stage; None for as many as make the step shortest.
        sites: the sites in the order of the pipeline, each with at least one stage; empty where there are none.
        cp: context-parallel size of every stage.
        ep: expert-parallel size of every stage.
        etp: tensor-parallel size of the experts; None for that of each stage.
        order: how ranks are numbered, in Megatron's notation.
        ends: number of layers of the first and of the last part of a U's edge; None without a U.
        layers: how many layers stages may hold.
        held_bytes: called for the bytes that a stage holds; None where that is not known.
        counted_twice: called for the bytes that a stage with several virtual stages holds once; None for nothing.
    """

    args: Any
    least_stages: int
    most_stages: int
    num_replicas: int | None = None
    sites: tuple[str, ...] = ()
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    order: RankOrder = RankOrder.STAGE_MAJOR
    ends: tuple[int, int] | None = None
    layers: LayerRule = "any"
    held_bytes: HeldBytes | None = None
    counted_twice: CountedTwice | None = None

    def __post_init__(self) -> None:
        flags = {
            "--num-layers": self.args.num_layers,
            "--micro-batch-size": self.args.micro_batch_size,
            "--global-batch-size": self.args.global_batch_size,
        }
        if missing := [flag for flag, value in flags.items() if not value]:
            raise LayoutError(
                f"{', '.join(missing)} missing; the layout is chosen for this model and this batch; give them"
            )
        if self.ends is not None and len(self.sites) < 2:
            raise LayoutError(
                "--layerwise-disaggregated-training with --vtp-size-list auto; nothing says which machine is the edge; "
                "give --vtp-sites edge,cloud to all, and to each machine its --vtp-site"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers to share out: those of the model, in a U without the edge's."""
        return int(self.args.num_layers) - sum(self.ends or ())

    def problems_of_size(self, size: int) -> tuple[str, ...]:
        """Say why no stage can have a tensor-parallel size; empty if it can."""
        return problems_of_size(self.args, size, cp=self.cp, ep=self.ep, etp=self.etp)

    def sizes(self, num_cards: int, num_replicas: int) -> tuple[int, ...]:
        """List the tensor-parallel sizes that a stage can have in a node with so many cards, ascending.

        The experts' sizes must divide the ranks of all its replicas.
        """
        return tuple(
            size
            for size in range(1, num_cards // self.cp + 1)
            if not self.problems_of_size(size) and self.layout((size,), num_replicas) is not None
        )

    def problems_of_replicas(self, number: int) -> tuple[str, ...]:
        """Say why batches cannot be shared by so many replicas; empty if they can."""
        return check_batches(self.args, ReplicaMap(dp_sizes=(number,)))

    def num_microbatches(self, num_replicas: int) -> int:
        """Return how many microbatches a replica runs in a step."""
        return int(self.args.global_batch_size) // (int(self.args.micro_batch_size) * num_replicas)

    def layout(self, sizes: Sequence[int], num_replicas: int) -> PipelineLayout | None:
        """Lay out stages; None if the experts' sizes do not divide their ranks."""
        world_size = sum(sizes) * self.cp * num_replicas
        try:
            return PipelineLayout.from_sizes(
                sizes, world_size=world_size, cp=self.cp, order=self.order, ep=self.ep, etp=self.etp
            )
        except LayoutError:
            return None


def fit_problem(nodes: Sequence[Node], constraints: Constraints) -> SearchProblem:
    """State the problem: use the most cards, with every number of replicas that divides the batches.

    No card was measured: a layer takes one card 1 forward and 2 backward, messages take nothing.

    Args:
        nodes: the nodes, in the order of the pipeline.
        constraints: what a list must satisfy.
    """
    # Nodes of a site follow each other, so the pools are in the order of the sites.
    alike: dict[tuple[str, int | None], list[Node]] = {}
    for node in nodes:
        alike.setdefault((node.site, node.memory_bytes), []).append(node)
    pools = [*alike.values()]
    num_cards = sum(node.num_cards for node in nodes)
    return SearchProblem(
        num_layers=constraints.args.num_layers,
        splits=tuple(_batch_split(pools, constraints, number) for number in _replica_counts(num_cards, constraints)),
        least_stages=constraints.least_stages,
        most_stages=constraints.most_stages,
        edge=constraints.sites[0] if constraints.ends else "",
        edge_layers=constraints.ends,
        objective="cards",
        layers=constraints.layers,
        is_stock=True,
    )


def _replica_counts(num_cards: int, constraints: Constraints) -> Iterator[int]:
    """Yield the numbers of replicas that divide the batches and for which there are cards, ascending."""
    most = num_cards // (constraints.cp * constraints.least_stages)
    for number in range(1, most + 1) if constraints.num_replicas is None else (constraints.num_replicas,):
        if not constraints.problems_of_replicas(number):
            yield number


def _batch_split(pools: Sequence[Sequence[Node]], constraints: Constraints, num_replicas: int) -> BatchSplit:
    num_layers = constraints.args.num_layers
    largest = max(node.num_cards for nodes in pools for node in nodes)
    speeds = {
        size: Speed(forward_s=(1 / size,) * num_layers, backward_s=(2 / size,) * num_layers)
        for size in constraints.sizes(largest, num_replicas)
    }
    return BatchSplit(
        num_replicas=num_replicas,
        num_microbatches=constraints.num_microbatches(num_replicas),
        micro_batch_size=constraints.args.micro_batch_size,
        pools=tuple(_pool(nodes, constraints.cp, speeds) for nodes in pools),
        cp=constraints.cp,
        held_bytes=constraints.held_bytes,
        counted_twice=constraints.counted_twice,
    )


def _pool(nodes: Sequence[Node], cp: int, speeds: dict[int, Speed]) -> NodePool:
    cards_per_node = tuple(node.num_cards // cp for node in nodes)
    return NodePool(
        name=nodes[0].site,
        cards_per_node=cards_per_node,
        speeds={size: speed for size, speed in speeds.items() if size <= max(cards_per_node)},
        site=nodes[0].site,
        memory_bytes=nodes[0].memory_bytes,
        nodes=tuple(nodes),
    )
