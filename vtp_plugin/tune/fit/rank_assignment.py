"""Which card becomes which rank of a fitted run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vtp_plugin.plan.launch.node_ranks import ranks_by_node
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout


def assign_ranks(
    node_names: Sequence[Sequence[str]], layout: PipelineLayout, cards: Mapping[str, Sequence[int]]
) -> dict[int, int]:
    """Assign ranks to cards.

    Args:
        node_names: name of the node of every replica of every stage.
        layout: the pipeline layout.
        cards: for every node the cards that work, each as a number, such as the rank that the launcher gave.

    Returns:
        The rank of every card that works in the run, by the card's number.

    >>> layout = PipelineLayout.from_sizes((2, 1), world_size=3)
    >>> assign_ranks([["a"], ["b"]], layout, {"a": [2, 3], "b": [0, 1]})
    {2: 0, 3: 1, 0: 2}
    """
    return {
        card: rank
        for name, ranks in ranks_by_node(node_names, layout).items()
        for card, rank in zip(cards[name], ranks, strict=False)
    }
