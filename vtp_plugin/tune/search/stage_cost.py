"""What a stage of each type costs, and the links between stages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from vtp_plugin.tune.cluster.speed import Link, Speed, all_reduce_s
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the layers of a model cost on a stage type, as prefix sums: entry i is the sum over the layers before i.

    Attributes:
        forward_s: prefix sums of the layers' forward seconds, for a microbatch.
        backward_s: prefix sums of the layers' backward seconds, for a microbatch.
        update_s: prefix sums of the optimizer's seconds.
        gradient_bytes: prefix sums of the bytes of gradients that all replicas sum.
        expert_bytes: prefix sums of the bytes of gradients of experts that only some ranks have copies of.
        messages: prefix sums of the number of messages between ranks that share experts, forward and backward.
        peers: number of ranks that share experts.
        peer_bytes: bytes of a message between two of these ranks.
        peer_s: lower bound on the seconds of such a message, which the times above include.
        first_s: forward and backward seconds of what the first stage has before its layers.
        last_s: forward and backward seconds of what the last stage has behind its layers.
        ends_s: forward and backward seconds together of the model's ends: of none, of the first, of the last, of both.
        least_s: forward and backward seconds of the quickest layer.
        memory_bytes: memory of a card, in bytes; None for no limit.
        gather_s: seconds in which the stage's ranks gather a tensor that crosses a boundary, or in which one of them
            gathers or scatters it.
        broadcast_s: seconds in which one of the stage's ranks broadcasts a tensor that crosses a boundary.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    gradient_bytes: tuple[float, ...]
    expert_bytes: tuple[float, ...]
    messages: tuple[tuple[float, ...], tuple[float, ...]]
    peers: int
    peer_bytes: int
    peer_s: float
    first_s: tuple[float, float]
    last_s: tuple[float, float]
    ends_s: tuple[float, float, float, float]
    least_s: float
    memory_bytes: int | None
    gather_s: float
    broadcast_s: float

    def times_s(self, start: int, end: int, *, is_first: bool, is_last: bool) -> tuple[float, float]:
        """Give the forward and backward seconds of a stage that holds the layers from ``start`` to before ``end``."""
        forward = self.forward_s[end] - self.forward_s[start]
        backward = self.backward_s[end] - self.backward_s[start]
        for is_there, (more_forward, more_backward) in ((is_first, self.first_s), (is_last, self.last_s)):
            if is_there:
                forward, backward = forward + more_forward, backward + more_backward
        return forward, backward


def work_of(stage_type: StageType, split: BatchSplit) -> Work:
    """Give what a stage type costs: its replicas wait for the slowest of them.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> speeds = [Speed(forward_s=(time, time), backward_s=(1, 1)) for time in (1.0, 2.0)]
    >>> pools = tuple(NodePool(name="", cards_per_node=(1,), speeds={1: speed}) for speed in speeds)
    >>> split = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> work_of(StageType((0, 1), 1), split).forward_s
    (0.0, 2.0, 4.0)
    """
    pools = split.pools
    speeds = [pools[pool_index].speeds[stage_type.tp] for pool_index in stage_type.pools]
    known = [pools[pool_index].memory_bytes for pool_index in stage_type.pools]

    def sums(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(accumulate((max(column) for column in zip(*rows, strict=True)), initial=0.0))

    def slowest(ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return max(end[0] for end in ends), max(end[1] for end in ends)

    first_speed = speeds[0]
    num_layers = len(first_speed.forward_s)
    nothing = (0.0,) * num_layers
    peer_s = _best_peer_s(stage_type, split, first_speed)
    counts = first_speed.peer_messages or ((0, 0),) * num_layers

    def layers(rows: Sequence[Sequence[float]], way: int) -> tuple[float, ...]:
        return sums([[time + number[way] * peer_s for time, number in zip(row, counts, strict=True)] for row in rows])

    forward, backward = layers([each.forward_s for each in speeds], 0), layers([each.backward_s for each in speeds], 1)
    first, last = slowest([speed.first_s for speed in speeds]), slowest([speed.last_s for speed in speeds])
    return Work(
        forward_s=forward,
        backward_s=backward,
        update_s=sums([speed.update_s or nothing for speed in speeds]),
        gradient_bytes=sums([speed.gradient_bytes or nothing for speed in speeds]),
        expert_bytes=sums([speed.expert_bytes or nothing for speed in speeds]),
        messages=(sums([[number[0] for number in counts]]), sums([[number[1] for number in counts]])),
        peers=first_speed.peers,
        peer_bytes=first_speed.peer_bytes,
        peer_s=peer_s,
        first_s=first,
        last_s=last,
        ends_s=(0.0, sum(first), sum(last), sum(first) + sum(last)),
        least_s=min(forward[i + 1] - forward[i] + backward[i + 1] - backward[i] for i in range(num_layers)),
        memory_bytes=min((limit for limit in known if limit is not None), default=None),
        gather_s=max(speed.gather_s for speed in speeds),
        broadcast_s=max(speed.broadcast_s for speed in speeds),
    )


def _best_peer_s(stage_type: StageType, split: BatchSplit, speed: Speed) -> float:
    """Bound from below the seconds of a message between ranks that share experts."""
    if not any(map(any, speed.peer_messages)):
        return 0.0
    pools = [split.pools[pool_index] for pool_index in stage_type.pools]
    replicas = -(-speed.peers // (stage_type.tp * split.cp))
    if replicas == 1:
        return max(pool.inside.time_s(speed.peer_bytes) for pool in pools)
    # Several replicas share experts: they may all be in one node, where one has room for them.
    links = [pool.between for pool in pools]
    links += [pool.inside for pool in pools if max(pool.cards_per_node) >= replicas * stage_type.tp]
    return min(link.time_s(speed.peer_bytes) for link in links)


def peer_s(
    problem: SearchProblem, split: BatchSplit, stage_type: StageType, work: Work, nodes: Sequence[tuple[int, int]]
) -> float:
    """Give the seconds of a message between ranks that share experts, over the slowest link between two of them.

    Args:
        problem: the search problem.
        split: how the samples of the step are shared out.
        stage_type: the type of the stage.
        work: what the stage costs.
        nodes: the nodes of its replicas.
    """
    ranks = stage_type.tp * split.cp
    slowest = 0.0
    for start in range(0, ranks * len(nodes), work.peers):
        own = nodes[start // ranks : -(-(start + work.peers) // ranks)]
        for pair in combinations(own, 2) if len(own) > 1 else [(own[0], own[0])]:
            slowest = max(slowest, link_between(problem, split, *pair).time_s(work.peer_bytes))
    return slowest


class Works(dict[StageType, Work]):
    """What each stage type costs, computed when it is first looked up."""

    def __init__(self, split: BatchSplit) -> None:
        super().__init__()
        self.split = split

    def __missing__(self, stage_type: StageType) -> Work:
        work = self[stage_type] = work_of(stage_type, self.split)
        return work


def most_held(problem: SearchProblem, split: BatchSplit, stage_type: StageType, work: Work) -> int:
    """Count the layers that a stage type has memory for at most, anywhere in the pipeline."""
    held, limit = split.held_bytes, work.memory_bytes
    if held is None or limit is None:
        return problem.num_layers
    # Between others a stage has no ends of the model, and keeps two microbatches at least; the last one keeps one.
    positions = ((False, False, 2), (False, True, 1))

    def fits(number: int) -> bool:
        starts = range(problem.num_layers - number + 1)
        size = (stage_type.tp, split.num_replicas)
        return any(held(*size, start, start + number, *position) <= limit for position in positions for start in starts)

    return bisect_left(range(1, problem.num_layers + 1), True, key=lambda number: not fits(number))


def link_between(problem: SearchProblem, split: BatchSplit, one: tuple[int, int], other: tuple[int, int]) -> Link:
    """Give the link between two nodes, each named by the number of its pool and its own number there.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", cards_per_node=(1, 1), speeds={}, between=Link(latency_s=1.0)),)
    >>> split = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> problem = SearchProblem(num_layers=1, splits=(split,), least_stages=1, most_stages=2)
    >>> link_between(problem, split, (0, 0), (0, 0)).latency_s, link_between(problem, split, (0, 0), (0, 1)).latency_s
    (0.0, 1.0)
    """
    first, second = split.pools[one[0]], split.pools[other[0]]
    if one == other:
        return first.inside
    sites = (first.site, second.site) if first.site <= second.site else (second.site, first.site)
    if sites[0] != sites[1] and sites in problem.across:
        return problem.across[sites]
    return max(first.between, second.between, key=lambda link: link.time_s(split.message_bytes))


def hop_s(split: BatchSplit, link: Link, src_tp: int, dst_tp: int) -> float:
    """Bound from below the seconds of a message over a link, whichever transport is used.

    >>> split = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=(), message_bytes=8)
    >>> [hop_s(split, Link(bytes_per_s=1.0, at_once=number), 4, 2) for number in (None, 1, 2, 4)]
    [8.0, 8.0, 4.0, 4.0]
    """
    # All of the tensor crosses once at least, in as many parts as the smaller stage has ranks at best.
    parts = 1 if link.at_once is None else min(src_tp, dst_tp, link.at_once)
    return link.time_s(split.message_bytes / parts)


def best_hop_s(problem: SearchProblem, split: BatchSplit, one: StageType, other: StageType) -> float:
    """Bound from below the seconds of a message between two stages, over the quickest link that could connect them."""
    hops_s = []
    for pool_index in one.pools:
        for next_index in other.pools:
            fits_one_node = (
                pool_index == next_index and max(split.pools[pool_index].cards_per_node) >= one.tp + other.tp
            )
            for node in (0, 1) if fits_one_node else (1,):
                link = link_between(problem, split, (pool_index, 0), (next_index, node))
                hops_s.append(hop_s(split, link, one.tp, other.tp))
    return min(hops_s)


def tail(problem: SearchProblem, split: BatchSplit, stage_type: StageType, work: Work, num_layers: int) -> float:
    """Bound from below what the first stage does after its last backward: sum gradients, and step the optimizer."""
    if split.num_replicas * split.cp == 1:
        return work.update_s[num_layers]
    first, last = stage_type.replica_pools[0], stage_type.replica_pools[-1]
    largest = max(split.pools[first].cards_per_node)
    is_one_node = first == last and largest >= split.num_replicas * stage_type.tp
    link = link_between(problem, split, (first, 0), (last, 0 if is_one_node else 1))
    return work.update_s[num_layers] + gradients_s(split, stage_type, work, [(0, num_layers)], link)


def gradients_s(
    split: BatchSplit, stage_type: StageType, work: Work, parts: Sequence[tuple[int, int]], link: Link
) -> float:
    """Give the seconds in which a stage sums its gradients, in rings whose slowest link is given.

    Args:
        split: how the samples of the step are shared out.
        stage_type: the type of the stage.
        work: what the stage costs.
        parts: for each of its virtual stages the first layer, and the first layer behind it.
        link: the slowest link of the rings.
    """
    num_ranks = split.num_replicas * split.cp
    dense, routed = (
        sum(sums[end] - sums[start] for start, end in parts) for sums in (work.gradient_bytes, work.expert_bytes)
    )
    copies = num_ranks * stage_type.tp // work.peers
    return all_reduce_s(dense, num_ranks, link) + (all_reduce_s(routed, copies, link) if copies > 1 else 0.0)
