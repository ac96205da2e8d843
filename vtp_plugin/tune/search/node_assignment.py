"""Put the replicas of stages into nodes, neighbours near each other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.tune.search.bin_packing import pack
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import hop_s, link_between

Node = tuple[int, int]
"""A pool and a node of it, both by number."""

# Nodes that are tried for all stages together, before the best way so far is taken; of long lists few more than groups.
_MOST_TRIES = 3000
_LONG = 16
# What the sum of gradients counts beside the messages, on the first stage and on the last: a stage that ends early sums
# while others compute.
_WEIGHTS = ((0.0, 0.0), (3.0, 0.1), (1.0, 1.0), (9.0, 9.0))


def has_rooms(shape: BatchSplit, kinds: Sequence[StageType]) -> bool:
    """Whether all replicas of all stages go into the nodes, each into one.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", rooms=(4, 2), speeds={}),)
    >>> shape = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> has_rooms(shape, [StageType((0, 0), 3)]), has_rooms(shape, [StageType((0, 0), 2)])
    (False, True)
    """
    return all(pack(_groups(kinds, place), pool.rooms) is not None for place, pool in enumerate(shape.pools))


def _groups(kinds: Sequence[StageType], place: int) -> list[int]:
    """List the sizes of all groups in a pool, the largest first."""
    return sorted((kind.tp for kind in kinds for each in kind.places if each == place), reverse=True)


def assign_nodes(
    question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType]
) -> list[tuple[tuple[Node, ...], ...]]:
    """Find nodes for every replica of every stage, so that messages and gradients take short ways.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.

    Returns:
        Ways, each with the node of each replica of every stage, for messages alone and for both; none if they do not
        all go in. Of a large list each is the way that was found first: where the stage before is, else where the least
        room is left. Where cards count there is one way: where the least room is left.
    """
    if not has_rooms(shape, kinds):
        return []
    if question.objective == "cards":
        return [_by_stage(shape, _by_packing(shape, kinds))]
    found = []
    for weight in _WEIGHTS if shape.num_replicas > 1 else _WEIGHTS[:1]:
        walk = _Walk(question, shape, kinds, weight)
        walk.go(0, 0.0)
        found.append(walk.best if walk.best is not None else _by_packing(shape, kinds))
    return [_by_stage(shape, nodes) for nodes in dict.fromkeys(found)]


def along_nodes(shape: BatchSplit, kinds: Sequence[StageType]) -> tuple[StageType, ...]:
    """Put stages where the least room is left, replicas of one near each other, and let them follow their nodes.

    Args:
        shape: of the step.
        kinds: of the stages, for which there is room, those of one kind together.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", rooms=(4, 6), speeds={}),)
    >>> shape = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> [kind.tp for kind in along_nodes(shape, [StageType((0,), 4), StageType((0,), 4), StageType((0,), 2)])]
    [4, 4, 2]
    >>> [kind.tp for kind in along_nodes(shape, [StageType((0,), 6), StageType((0,), 2)])]
    [2, 6]
    """
    stages = zip(kinds, _by_stage(shape, _by_packing(shape, kinds)), strict=True)
    return tuple(kind for kind, _ in sorted(stages, key=lambda one: (one[1][0], -one[0].tp, one[1])))


def _by_stage(shape: BatchSplit, nodes: Sequence[Node]) -> tuple[tuple[Node, ...], ...]:
    replicas = shape.num_replicas
    return tuple(tuple(nodes[start : start + replicas]) for start in range(0, len(nodes), replicas))


def _by_packing(shape: BatchSplit, kinds: Sequence[StageType]) -> tuple[Node, ...]:
    rooms: dict[tuple[int, int], list[int]] = {}
    for place, pool in enumerate(shape.pools):
        groups = _groups(kinds, place)
        for size, room in sorted(zip(groups, pack(groups, pool.rooms) or (), strict=True)):
            rooms.setdefault((place, size), []).append(room)
    return tuple((place, rooms[place, kind.tp].pop(0)) for kind in kinds for place in kind.places)


class _Walk:
    """Tries nodes for one replica after the other, what costs least first."""

    def __init__(
        self, question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType], weight: tuple[float, float]
    ) -> None:
        self.question = question
        self.shape = shape
        self.groups = [(place, kind.tp) for kind in kinds for place in kind.places]
        self.left = [[*pool.rooms] for pool in shape.pools]
        self.nodes: list[Node] = []
        self.best: tuple[Node, ...] | None = None
        self.best_s = math.inf
        self.num_tries = 0
        self.most_tries = _MOST_TRIES if len(self.groups) <= _LONG else 2 * len(self.groups)
        self.weight = weight

    def go(self, group: int, cost_s: float) -> None:
        """Put the groups from one on."""
        if cost_s >= self.best_s or self.num_tries > self.most_tries:
            return
        if group == len(self.groups):
            self.best, self.best_s = tuple(self.nodes), cost_s
            return
        place, size = self.groups[group]
        rooms = self.left[place]
        # Of nodes with as much room that hold nothing near, one is as good as another.
        tries = {
            (self._cost_s(group, (place, room)), free, -room if free < self.shape.pools[place].rooms[room] else 0): room
            for room, free in enumerate(rooms)
            if free >= size
        }
        for (added_s, *_), room in sorted(tries.items()):
            self.num_tries += 1
            rooms[room] -= size
            self.nodes.append((place, room))
            self.go(group + 1, cost_s + added_s)
            self.nodes.pop()
            rooms[room] += size

    def _cost_s(self, group: int, node: Node) -> float:
        """What messages from the stage before take, and gradients from the replica before."""
        replicas = self.shape.num_replicas
        cost = 0.0
        if group >= replicas:
            link = self._link(self.nodes[group - replicas], node)
            cost += 2 * hop_s(self.shape, link, self.groups[group - replicas][1], self.groups[group][1])
        if group % replicas:
            share = group / len(self.groups)
            weight = self.weight[0] * (1 - share) + self.weight[1] * share
            cost += weight * self._link(self.nodes[group - 1], node).time_s(self.shape.message_bytes)
        return cost

    def _link(self, one: Node, other: Node) -> Link:
        return link_between(self.question, self.shape, one, other)
