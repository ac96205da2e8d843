"""Fitting a list of sizes to the cards that are there, as a problem for the search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.cluster.speed import Speed
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.problem import BatchSplit, NodePool, SearchProblem


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
