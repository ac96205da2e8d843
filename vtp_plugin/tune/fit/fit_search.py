"""The list of sizes that fits the cards, as a question that is asked of the search."""

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
        layers: of every stage; of a U the edge's first part, every cloud stage, the edge's last part.
        num_replicas: of every stage.
        places: for every stage the node of each replica, as a number among ``nodes``.
        nodes: what is there, in the order of the pipeline.
        cp: context-parallel size of every stage.
        step: how long a step takes as simulated.
        costs: of a microbatch; where no card was measured, a layer takes one card 1 forward and 2 backward.
        in_flight: most microbatches in flight on every stage, where others than usual were chosen; else empty.
    """

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    num_replicas: int
    places: tuple[tuple[int, ...], ...]
    nodes: tuple[Node, ...]
    cp: int
    step: float
    costs: Costs
    in_flight: tuple[int, ...] = ()

    @property
    def num_used(self) -> int:
        """Cards that work."""
        return sum(self.sizes) * self.cp * self.num_replicas

    @property
    def num_spare(self) -> tuple[int, ...]:
        """Cards of each node that the run does without."""
        left = [node.num_cards for node in self.nodes]
        for size, places in zip(self.sizes, self.places, strict=True):
            for node in places:
                left[node] -= size * self.cp
        return tuple(left)

    @property
    def node_names(self) -> list[list[str]]:
        """Name of the node of every replica of every stage."""
        return [[self.nodes[place].name for place in places] for places in self.places]

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage."""
        return tuple(self.nodes[places[0]].site for places in self.places)


def fitted_of(choice: Candidate, nodes: Sequence[Node], pools: Sequence[Sequence[int]]) -> FittedLayout:
    """Give what a search chose, on nodes that have names.

    Args:
        choice: of the search.
        nodes: in the order of the pipeline.
        pools: of every pool of the search its nodes, as numbers among ``nodes``.
    """
    return FittedLayout(
        sizes=choice.sizes,
        layers=choice.layers,
        num_replicas=choice.shape.num_replicas,
        places=tuple(tuple(pools[pool][room] for pool, room in places) for places in choice.nodes),
        nodes=tuple(nodes),
        cp=choice.shape.cp,
        step=choice.step_s,
        costs=choice.costs,
        in_flight=choice.order.in_flight,
    )


def search(nodes: Sequence[Node], ask: Constraints) -> dict[int, FittedLayout]:
    """Find the best list for every number of replicas that is possible; none if nothing fits.

    For each number the list that leaves the fewest cards spare is taken; of several the one with fewest stages, then
    with the largest sizes.

    Args:
        nodes: in the order of the pipeline.
        ask: what is wanted.
    """
    # Nodes of a site follow each other, so the pools are in the order of the sites.
    alike: dict[tuple[str, int | None], list[int]] = {}
    for number, node in enumerate(nodes):
        alike.setdefault((node.site, node.memory_bytes), []).append(number)
    pools = [*alike.values()]
    found = {}
    for number in replica_counts(nodes, ask):
        chosen = fastest(_question(nodes, ask, pools, number), num_best=1).best
        if chosen:
            found[number] = fitted_of(chosen[0], nodes, pools)
    return found


def _question(
    nodes: Sequence[Node], ask: Constraints, pools: Sequence[Sequence[int]], num_replicas: int
) -> SearchProblem:
    """Ask for as many cards as can work; a layer takes one card 1 forward and 2 backward, messages take nothing."""
    num_layers = ask.args.num_layers
    speeds = {
        size: Speed(forward_s=(1 / size,) * num_layers, backward_s=(2 / size,) * num_layers)
        for size in ask.sizes(max(node.num_cards for node in nodes), num_replicas)
    }
    shape = BatchSplit(
        num_replicas=num_replicas,
        num_microbatches=ask.num_microbatches(num_replicas),
        micro_batch_size=ask.args.micro_batch_size,
        pools=tuple(_pool([nodes[number] for number in numbers], ask.cp, speeds) for numbers in pools),
        cp=ask.cp,
        held_bytes=ask.held_bytes,
        counted_twice=ask.counted_twice,
    )
    return SearchProblem(
        num_layers=num_layers,
        shapes=(shape,),
        least_stages=ask.least_stages,
        most_stages=ask.most_stages,
        edge=ask.sites[0] if ask.ends else "",
        around=ask.ends,
        objective="cards",
        layers="ends" if ask.is_alike else "any",
        is_stock=True,
    )


def _pool(nodes: Sequence[Node], cp: int, speeds: dict[int, Speed]) -> NodePool:
    rooms = tuple(node.num_cards // cp for node in nodes)
    return NodePool(
        name=nodes[0].site,
        rooms=rooms,
        speeds={size: speed for size, speed in speeds.items() if size <= max(rooms)},
        site=nodes[0].site,
        memory_bytes=nodes[0].memory_bytes,
    )


def replica_counts(nodes: Sequence[Node], ask: Constraints) -> Iterator[int]:
    """Yield the numbers of replicas that divide the batches and for which there are cards, ascending."""
    most = sum(node.num_cards for node in nodes) // (ask.cp * ask.least_stages)
    for number in range(1, most + 1) if ask.num_replicas is None else (ask.num_replicas,):
        if not ask.problems_of_replicas(number):
            yield number
