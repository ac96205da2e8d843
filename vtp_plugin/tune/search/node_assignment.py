"""Which nodes a stage gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from vtp_plugin.tune.search.problem import BatchSplit, NodeIndex, SearchSpace, StageType
from vtp_plugin.tune.search.stage_cost import hop_s


def pack(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    """Find a bin for every group.

    Best fit, the largest group first. If each size divides the next larger one, this packs all groups whenever that is
    possible: a larger group takes exactly the space of several smaller ones. For other sizes all packings are tried.

    Args:
        sizes: sizes of the groups, descending.
        capacities: capacity of each bin.

    Returns:
        The number of each group's bin; None if they do not all fit.

    >>> pack((4, 2, 2), (6, 2)), pack((3, 3), (4, 2)), pack((3, 2, 2, 2, 2), (6, 5))
    ((0, 0, 1), None, (1, 1, 0, 0, 0))
    """
    if sum(sizes) > sum(capacities):
        return None
    divide_each_other = all(larger % smaller == 0 for larger, smaller in pairwise(dict.fromkeys(sizes)))
    found = _best_fit(sizes, capacities)
    return found if found is not None or divide_each_other else _exhaustive(sizes, capacities)


def _best_fit(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    left, bins = list(capacities), []
    for size in sizes:
        fitting = [(free, number) for number, free in enumerate(left) if free >= size]
        if not fitting:
            return None
        _, number = min(fitting)
        left[number] -= size
        bins.append(number)
    return tuple(bins)


def _exhaustive(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    hopeless: set[tuple[int, ...]] = set()
    left, bins = list(capacities), []

    def fill_from(group: int) -> bool:
        # Which bin is which does not matter for what still fits.
        state = (group, *sorted(left))
        if group == len(sizes):
            return True
        if state in hopeless:
            return False
        size = sizes[group]
        for free, number in sorted({free: number for number, free in reversed([*enumerate(left)])}.items()):
            if free >= size:
                left[number] -= size
                bins.append(number)
                if fill_from(group + 1):
                    return True
                bins.pop()
                left[number] += size
        hopeless.add(state)
        return False

    return tuple(bins) if fill_from(0) else None


# Nodes that are tried for all stages together, before the best assignment so far is taken; for long lists only
# a few more than there are groups.
_MOST_TRIES = 3000
_LONG = 16
# Weight of the gradients' sum beside the messages, on the first stage and on the last: a stage that ends early sums
# while others compute.
_WEIGHTS = ((0.0, 0.0), (3.0, 0.1), (1.0, 1.0), (9.0, 9.0))


def fits_nodes(split: BatchSplit, stage_types: Sequence[StageType]) -> bool:
    """Whether all replicas of all stages fit the nodes, each inside one.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", cards_per_node=(4, 2), speeds={}),)
    >>> split = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> fits_nodes(split, [StageType((0, 0), 3)]), fits_nodes(split, [StageType((0, 0), 2)])
    (False, True)
    """
    return all(
        pack(_groups(stage_types, pool_index), pool.cards_per_node) is not None
        for pool_index, pool in enumerate(split.pools)
    )


def _groups(stage_types: Sequence[StageType], pool_index: int) -> list[int]:
    """List the sizes of all tensor-parallel groups in a pool, the largest first."""
    return sorted(
        (stage_type.tp for stage_type in stage_types for each in stage_type.replica_pools if each == pool_index),
        reverse=True,
    )


def assign_nodes(space: SearchSpace, stage_types: Sequence[StageType]) -> list[tuple[tuple[NodeIndex, ...], ...]]:
    """Find a node for every replica of every stage, so that messages and gradients have short ways.

    Args:
        space: the search space.
        stage_types: the type of every stage, in order.

    Returns:
        Assignments to compare, each with the node of each replica of every stage: one that is best for messages alone,
        others that also weigh the gradients' sums; none if the stages do not fit. For a long list each is the first one
        found: in the node of the stage before, else where the fewest cards are left. With the objective ``cards`` there
        is one assignment, where the fewest cards are left.
    """
    split = space.split
    if not fits_nodes(split, stage_types):
        return []
    if space.problem.objective == "cards":
        return [_by_stage(split, _by_packing(split, stage_types))]
    assignments = []
    for weight in _WEIGHTS if split.num_replicas > 1 else _WEIGHTS[:1]:
        search = _NodeSearch(space, stage_types, weight)
        search.assign(0, 0.0)
        assignments.append(search.best if search.best is not None else _by_packing(split, stage_types))
    return [_by_stage(split, nodes) for nodes in dict.fromkeys(assignments)]


def along_nodes(split: BatchSplit, stage_types: Sequence[StageType]) -> tuple[StageType, ...]:
    """Assign stages to the nodes where the fewest cards are left, and order them as their nodes are.

    Args:
        split: how the samples of the step are shared out.
        stage_types: the type of every stage, those of one type together; they fit the nodes.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", cards_per_node=(4, 6), speeds={}),)
    >>> split = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> four, two, six = (StageType((0,), tp) for tp in (4, 2, 6))
    >>> [stage_type.tp for stage_type in along_nodes(split, [four, four, two])]
    [4, 4, 2]
    >>> [stage_type.tp for stage_type in along_nodes(split, [six, two])]
    [2, 6]
    """
    stages = zip(stage_types, _by_stage(split, _by_packing(split, stage_types)), strict=True)
    return tuple(stage_type for stage_type, _ in sorted(stages, key=lambda one: (one[1][0], -one[0].tp, one[1])))


def _by_stage(split: BatchSplit, nodes: Sequence[NodeIndex]) -> tuple[tuple[NodeIndex, ...], ...]:
    replicas = split.num_replicas
    return tuple(tuple(nodes[start : start + replicas]) for start in range(0, len(nodes), replicas))


def _by_packing(split: BatchSplit, stage_types: Sequence[StageType]) -> tuple[NodeIndex, ...]:
    free_nodes: dict[tuple[int, int], list[int]] = {}
    for pool_index, pool in enumerate(split.pools):
        groups = _groups(stage_types, pool_index)
        for size, node in sorted(zip(groups, pack(groups, pool.cards_per_node) or (), strict=True)):
            free_nodes.setdefault((pool_index, size), []).append(node)
    return tuple(
        (pool_index, free_nodes[pool_index, stage_type.tp].pop(0))
        for stage_type in stage_types
        for pool_index in stage_type.replica_pools
    )


class _NodeSearch:
    """Depth-first search: nodes for one replica after the other, the cheapest first."""

    def __init__(self, space: SearchSpace, stage_types: Sequence[StageType], weight: tuple[float, float]) -> None:
        self.space = space
        self.split = space.split
        self.groups = [
            (pool_index, stage_type.tp) for stage_type in stage_types for pool_index in stage_type.replica_pools
        ]
        self.left = [[*pool.cards_per_node] for pool in space.split.pools]
        self.nodes: list[NodeIndex] = []
        self.best: tuple[NodeIndex, ...] | None = None
        self.best_s = math.inf
        self.num_tries = 0
        self.most_tries = _MOST_TRIES if len(self.groups) <= _LONG else 2 * len(self.groups)
        self.weight = weight

    def assign(self, group: int, cost_s: float) -> None:
        """Assign nodes to the groups from this one on."""
        if cost_s >= self.best_s or self.num_tries > self.most_tries:
            return
        if group == len(self.groups):
            self.best, self.best_s = tuple(self.nodes), cost_s
            return
        pool_index, size = self.groups[group]
        free_cards = self.left[pool_index]
        # Of nodes with equally many free cards that hold nothing near, one is as good as another.
        tries = {
            (
                self._cost_s(group, (pool_index, node)),
                num_free,
                -node if num_free < self.split.pools[pool_index].cards_per_node[node] else 0,
            ): node
            for node, num_free in enumerate(free_cards)
            if num_free >= size
        }
        for (added_s, *_), node in sorted(tries.items()):
            self.num_tries += 1
            free_cards[node] -= size
            self.nodes.append((pool_index, node))
            self.assign(group + 1, cost_s + added_s)
            self.nodes.pop()
            free_cards[node] += size

    def _cost_s(self, group: int, node: NodeIndex) -> float:
        """Give the seconds of messages from the stage before, and, weighted, of gradients from the replica before."""
        replicas = self.split.num_replicas
        cost = 0.0
        if group >= replicas:
            link = self.space.link(self.nodes[group - replicas], node)
            cost += 2 * hop_s(link, self.split.message_bytes, self.groups[group - replicas][1], self.groups[group][1])
        if group % replicas:
            share = group / len(self.groups)
            weight = self.weight[0] * (1 - share) + self.weight[1] * share
            cost += weight * self.space.link(self.nodes[group - 1], node).time_s(self.split.message_bytes)
        return cost
