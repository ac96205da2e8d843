"""Fitting a list of sizes to cards, as a problem for the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.fit.available_cards import Node
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.evaluate import Candidate
from vtp_plugin.tune.search.fastest import fastest
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedLayout:
    """A list that fits.

    Attributes:
        sizes: tensor-parallel size of every stage.
        layers: number of layers of every stage; in a U the edge's first part, every cloud stage, the edge's last part.
        num_replicas: number of replicas of every stage.
        replica_nodes: for every stage the node of each replica, as a number among ``nodes``.
        nodes: the nodes that are there, in the order of the pipeline.
        cp: context-parallel size of every stage.
        step: simulated time of a step, in the unit of ``costs``.
        costs: durations and links of a microbatch; where no card was measured, a layer takes one card 1 forward and 2
            backward.
        in_flight: most microbatches in flight on every stage, where they are not the default; else empty.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    replica_nodes: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    cp: int
    step: float
    costs: Costs
    in_flight: tuple[int, ...] = ()

    @property
    def num_used(self) -> int:
        """Number of cards that the run uses."""
        return sum(self.sizes) * self.cp * self.num_replicas

    @property
    def num_spare(self) -> tuple[int, ...]:
        """Number of cards of each node that the run does not use."""
        left = [node.num_cards for node in self.nodes]
        for size, nodes_of_stage in zip(self.sizes, self.replica_nodes, strict=True):
            for node in nodes_of_stage:
                left[node] -= size * self.cp
        return tuple(left)

    @property
    def node_names(self) -> list[list[str]]:
        """Name of the node of every replica of every stage."""
        return [[self.nodes[node].name for node in nodes_of_stage] for nodes_of_stage in self.replica_nodes]

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage."""
        return tuple(self.nodes[nodes_of_stage[0]].site for nodes_of_stage in self.replica_nodes)


def fitted_of(candidate: Candidate, nodes: Sequence[Node], pools: Sequence[Sequence[int]]) -> FittedLayout:
    """Turn a candidate of the search into a layout on nodes with names.

    Args:
        candidate: the candidate that the search found.
        nodes: the nodes, in the order of the pipeline.
        pools: the nodes of every pool of the search, as numbers among ``nodes``.
    """
    return FittedLayout(
        sizes=candidate.sizes,
        layers=candidate.layers,
        num_replicas=candidate.split.num_replicas,
        replica_nodes=tuple(
            tuple(pools[pool][node] for pool, node in nodes_of_stage) for nodes_of_stage in candidate.nodes
        ),
        nodes=tuple(nodes),
        cp=candidate.split.cp,
        step=candidate.step_s,
        costs=candidate.costs,
        in_flight=candidate.order.in_flight,
    )


def search(nodes: Sequence[Node], constraints: Constraints) -> dict[int, FittedLayout]:
    """Find the best list for every number of replicas that is possible; none if nothing fits.

    For each number the list that leaves the fewest cards spare is taken; of several the one with fewest stages, then
    with the largest sizes.

    Args:
        nodes: the nodes, in the order of the pipeline.
        constraints: what a list must satisfy.
    """
    # Nodes of a site follow each other, so the pools are in the order of the sites.
    alike: dict[tuple[str, int | None], list[int]] = {}
    for number, node in enumerate(nodes):
        alike.setdefault((node.site, node.memory_bytes), []).append(number)
    pools = [*alike.values()]
    found = {}
    for number in replica_counts(nodes, constraints):
        chosen = fastest(_problem(nodes, constraints, pools, number), num_best=1).best
        if chosen:
            found[number] = fitted_of(chosen[0], nodes, pools)
    return found


def _problem(
    nodes: Sequence[Node], constraints: Constraints, pools: Sequence[Sequence[int]], num_replicas: int
) -> SearchProblem:
    """State the problem: use the most cards; a layer takes one card 1 forward and 2 backward, messages nothing."""
    num_layers = constraints.args.num_layers
    speeds = {
        size: Speed(forward_s=(1 / size,) * num_layers, backward_s=(2 / size,) * num_layers)
        for size in constraints.sizes(max(node.num_cards for node in nodes), num_replicas)
    }
    split = BatchSplit(
        num_replicas=num_replicas,
        num_microbatches=constraints.num_microbatches(num_replicas),
        micro_batch_size=constraints.args.micro_batch_size,
        pools=tuple(_pool([nodes[number] for number in numbers], constraints.cp, speeds) for numbers in pools),
        cp=constraints.cp,
        held_bytes=constraints.held_bytes,
        counted_twice=constraints.counted_twice,
    )
    return SearchProblem(
        num_layers=num_layers,
        splits=(split,),
        least_stages=constraints.least_stages,
        most_stages=constraints.most_stages,
        edge=constraints.sites[0] if constraints.ends else "",
        edge_layers=constraints.ends,
        objective="cards",
        layers="ends" if constraints.is_alike else "any",
        is_stock=True,
    )


def _pool(nodes: Sequence[Node], cp: int, speeds: dict[int, Speed]) -> NodePool:
    cards_per_node = tuple(node.num_cards // cp for node in nodes)
    return NodePool(
        name=nodes[0].site,
        cards_per_node=cards_per_node,
        speeds={size: speed for size, speed in speeds.items() if size <= max(cards_per_node)},
        site=nodes[0].site,
        memory_bytes=nodes[0].memory_bytes,
    )


def replica_counts(nodes: Sequence[Node], constraints: Constraints) -> Iterator[int]:
    """Yield the numbers of replicas that divide the batches and for which there are cards, ascending."""
    most = sum(node.num_cards for node in nodes) // (constraints.cp * constraints.least_stages)
    for number in range(1, most + 1) if constraints.num_replicas is None else (constraints.num_replicas,):
        if not constraints.problems_of_replicas(number):
            yield number
