"""What stages send each other, and what a stage does beside its layers: lower bounds, and seconds on given nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations

from vtp_plugin.tune.cluster.speed import Link, all_reduce_s
from vtp_plugin.tune.search.memory_check import held_by
from vtp_plugin.tune.search.problem import NodeIndex, StageType
from vtp_plugin.tune.search.search_space import SearchSpace


def peer_s(space: SearchSpace, stage_type: StageType, nodes: Sequence[NodeIndex]) -> float:
    """Give the seconds of a message between ranks that share experts, over the slowest link between two of them.

    Args:
        space: the search space.
        stage_type: the type of the stage.
        nodes: the nodes of its replicas.
    """
    speed, ranks = space.speeds[stage_type], stage_type.tp * space.split.cp
    slowest = 0.0
    for start in range(0, ranks * len(nodes), speed.peers):
        own = nodes[start // ranks : -(-(start + speed.peers) // ranks)]
        for pair in combinations(own, 2) if len(own) > 1 else [(own[0], own[0])]:
            slowest = max(slowest, space.link(*pair).time_s(speed.peer_bytes))
    return slowest


def most_held(space: SearchSpace, stage_type: StageType) -> int:
    """Count the layers that a stage type has memory for at most, anywhere in the pipeline."""
    if stage_type not in space.most_held:
        space.most_held[stage_type] = _most_held(space, stage_type)
    return space.most_held[stage_type]


def _most_held(space: SearchSpace, stage_type: StageType) -> int:
    split, limit, num_layers = space.split, space.memory_bytes(stage_type), space.problem.num_layers
    if split.held_bytes is None or limit is None:
        return num_layers
    # Between others a stage has no ends of the model, and keeps two microbatches at least; the last one keeps one.
    positions = ((False, 2), (True, 1))

    def fits(number: int) -> bool:
        return any(
            held_by(split, stage_type, (start, start + number), peak, is_first=False, is_last=is_last) <= limit
            for is_last, peak in positions
            for start in range(num_layers - number + 1)
        )

    return bisect_left(range(1, num_layers + 1), True, key=lambda number: not fits(number))


def hop_s(link: Link, num_bytes: int, src_tp: int, dst_tp: int) -> float:
    """Bound from below the seconds of a message over a link, whichever transport is used.

    >>> [hop_s(Link(bytes_per_s=1.0, at_once=number), 8, 4, 2) for number in (None, 1, 2, 4)]
    [8.0, 8.0, 4.0, 4.0]
    """
    # All of the tensor crosses once at least, in as many parts as the smaller stage has ranks at best.
    parts = 1 if link.at_once is None else min(src_tp, dst_tp, link.at_once)
    return link.time_s(num_bytes / parts)


def best_hop_s(space: SearchSpace, one: StageType, other: StageType) -> float:
    """Bound from below the seconds of a message between two stages, over the quickest link that could connect them."""
    hops_s = []
    for pool_index in one.pools:
        for next_index in other.pools:
            most_cards = max(space.split.pools[pool_index].cards_per_node)
            fits_one_node = pool_index == next_index and most_cards >= one.tp + other.tp
            for node in (0, 1) if fits_one_node else (1,):
                link = space.link((pool_index, 0), (next_index, node))
                hops_s.append(hop_s(link, space.split.message_bytes, one.tp, other.tp))
    return min(hops_s)


def tail_s(space: SearchSpace, stage_type: StageType, num_layers: int) -> float:
    """Bound from below what the first stage does after its last backward: sum gradients, and step the optimizer."""
    split, update_s = space.split, space.speeds[stage_type].update_sums[num_layers]
    if split.num_replicas * split.cp == 1:
        return update_s
    first, last = stage_type.replica_pools[0], stage_type.replica_pools[-1]
    largest = max(split.pools[first].cards_per_node)
    is_one_node = first == last and largest >= split.num_replicas * stage_type.tp
    link = space.link((first, 0), (last, 0 if is_one_node else 1))
    return update_s + gradients_s(space, stage_type, [(0, num_layers)], link)


def gradients_s(space: SearchSpace, stage_type: StageType, parts: Sequence[tuple[int, int]], link: Link) -> float:
    """Give the seconds in which a stage sums its gradients, in rings whose slowest link is given.

    Args:
        space: the search space.
        stage_type: the type of the stage.
        parts: for each of its virtual stages the first layer, and the first layer behind it.
        link: the slowest link of the rings.
    """
    speed, num_ranks = space.speeds[stage_type], space.split.num_replicas * space.split.cp
    dense, routed = (
        sum(sums[end] - sums[start] for start, end in parts) for sums in (speed.gradient_sums, speed.expert_sums)
    )
    copies = num_ranks * stage_type.tp // speed.peers
    return all_reduce_s(dense, num_ranks, link) + (all_reduce_s(routed, copies, link) if copies > 1 else 0.0)
