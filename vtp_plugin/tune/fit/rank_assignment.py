"""Which card becomes which rank of a fitted run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.tune.fit.fit_search import FittedLayout


def assign_ranks(fitted: FittedLayout, layout: PipelineLayout, cards: Mapping[str, Sequence[int]]) -> dict[int, int]:
    """Assign ranks to cards.

    Args:
        fitted: the fitted layout.
        layout: the pipeline layout made of it.
        cards: for every node the cards that work, each as a number, such as the rank that the launcher gave.

    Returns:
        The rank of every card that works in the run, by the card's number.

    >>> from vtp_plugin.tune.fit.available_cards import Node
    >>> nodes = (Node(name="a", num_cards=2), Node(name="b", num_cards=2))
    >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
    >>> from vtp_plugin.plan.schedule.order.placement import plain_placement
    >>> fitted = FittedLayout(
    ...     sizes=(2, 1), layers=(2, 1), num_replicas=1, replica_nodes=((0,), (1,)), nodes=nodes, cp=1, step=1.0,
    ...     costs=uniform_costs(plain_placement(2)))
    >>> layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    >>> assign_ranks(fitted, layout, {"a": [2, 3], "b": [0, 1]})
    {2: 0, 3: 1, 0: 2}
    """
    left = {name: list(numbers) for name, numbers in cards.items()}
    ranks: dict[int, int] = {}
    for stage, replica_nodes in enumerate(fitted.replica_nodes):
        for replica, node in enumerate(replica_nodes):
            free = left[fitted.nodes[node].name]
            for cp_rank in range(fitted.cp):
                for rank in layout.tp_ranks(stage, replica, cp_rank):
                    ranks[free.pop(0)] = rank
    return ranks
