"""Chooses TP sizes, layers and replicas for the devices that are there."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.errors import LayoutError, ShortageError
from vtp_plugin.tune.cluster.machines import Node
from vtp_plugin.tune.fit.available_cards import in_order
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_problem import fit_problem
from vtp_plugin.tune.fit.reasons import why_nothing
from vtp_plugin.tune.search.evaluate import Candidate, with_split
from vtp_plugin.tune.search.find_best import find_best


def fit(nodes: Sequence[Node], constraints: Constraints) -> tuple[Candidate, ...]:
    """Choose the best layout for the cards that are there; the result depends on the arguments alone.

    Each replica of a stage is inside one node. For every number of replicas that divides the batches, the list that
    leaves the fewest cards spare is taken; of several the one with fewest stages, then with the largest sizes. Among
    these, one for each number of replicas, the shortest step decides, then the fewest spare cards. Stages follow the
    names of sites and nodes, larger ones first inside a node.

    Args:
        nodes: the nodes, in any order.
        constraints: what a list must satisfy.

    Returns:
        The best layout, and behind it that of every other number of replicas that is possible.

    Raises:
        ShortageError: nothing fits; more cards would.
        ConfigError: nothing fits, however many cards there are; or a U-shape has lost its edge.

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(
    ...     num_layers=12, micro_batch_size=1, global_batch_size=8, seq_length=64, sequence_parallel=True,
    ...     num_attention_heads=12, group_query_attention=True, num_query_groups=4)
    >>> nodes = [Node(name="a", num_cards=4), Node(name="b", num_cards=3)]
    >>> [best] = fit(nodes, Constraints(args=args, least_stages=2, most_stages=3, num_replicas=1))
    >>> best.sizes, best.layers, [number for _, number in best.spare_cards]
    ((4, 2, 1), (8, 3, 1), [0, 0])
    """
    ordered = in_order(nodes, constraints.sites)
    _require_sites(ordered, constraints)
    best = find_best(fit_problem(ordered, constraints)).best
    if not best:
        raise why_nothing(ordered, constraints)
    return best


def fit_split(nodes: Sequence[Node], constraints: Constraints, fitted: Candidate) -> Candidate:
    """Split the backwards of a fitted layout where the memory allows it and its step is shorter.

    Args:
        nodes: the nodes, in any order.
        constraints: what the layout had to satisfy.
        fitted: the layout; a run would not choose another one, either.
    """
    return with_split(fit_problem(in_order(nodes, constraints.sites), constraints), fitted)


def _require_sites(nodes: Sequence[Node], constraints: Constraints) -> None:
    for site in constraints.sites:
        if not any(node.num_cards for node in nodes if node.site == site):
            is_edge = constraints.ends is not None and site == constraints.sites[0]
            what = "the edge holds the data and both ends of the model" if is_edge else "it has at least one stage"
            kind = LayoutError if is_edge else ShortageError
            raise kind(f"site {site} has no device left; {what}; bring one back, or leave the site out")
