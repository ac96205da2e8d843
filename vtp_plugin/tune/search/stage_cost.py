"""What a kind of stage costs, and what lies between two of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from vtp_plugin.tune.cluster.speed import Link, Speed, all_reduce_s
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How long the layers of a model take on a kind of stage, as sums from the first layer on.

    Attributes:
        forward_s: of the layers before each number, and before the end.
        backward_s: likewise.
        update_s: likewise.
        gradient_bytes: likewise.
        expert_bytes: likewise, of experts that only some ranks have copies of.
        messages: likewise, of ranks that share experts: forward and backward.
        peers: ranks that share experts.
        peer_bytes: of a message between two of them.
        peer_s: the time of such a message, at best: in the times above.
        first_s: forward and backward of what the first stage has before its layers.
        last_s: likewise of what the last stage has behind them.
        ends_s: of a stage without ends of the model, with what is before its layers, behind them, and with both:
            forward and backward together.
        least_s: forward and backward of the quickest layer.
        memory_bytes: of a card; None where it does not count.
        gather_s: in which its ranks gather a tensor that crosses, or one of them gathers or scatters it.
        broadcast_s: likewise, in which one of them gives it to all.
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
        """Give forward and backward of a stage that holds layers from ``start`` up to ``end``."""
        forward = self.forward_s[end] - self.forward_s[start]
        backward = self.backward_s[end] - self.backward_s[start]
        for is_there, (more_forward, more_backward) in ((is_first, self.first_s), (is_last, self.last_s)):
            if is_there:
                forward, backward = forward + more_forward, backward + more_backward
        return forward, backward


def work_of(kind: StageType, shape: BatchSplit) -> Work:
    """Give what a kind of stage costs: its replicas wait for the slowest of them.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> from vtp_plugin.tune.cluster.speed import Speed
    >>> speeds = [Speed(forward_s=(time, time), backward_s=(1, 1)) for time in (1.0, 2.0)]
    >>> pools = tuple(NodePool(name="", rooms=(1,), speeds={1: speed}) for speed in speeds)
    >>> shape = BatchSplit(num_replicas=2, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> work_of(StageType((0, 1), 1), shape).forward_s
    (0.0, 2.0, 4.0)
    """
    pools = shape.pools
    speeds = [pools[place].speeds[kind.tp] for place in kind.pools]
    known = [pools[place].memory_bytes for place in kind.pools]

    def sums(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
        return tuple(accumulate((max(column) for column in zip(*rows, strict=True)), initial=0.0))

    def slowest(ends: Sequence[tuple[float, float]]) -> tuple[float, float]:
        return max(end[0] for end in ends), max(end[1] for end in ends)

    one = speeds[0]
    num_layers = len(one.forward_s)
    nothing = (0.0,) * num_layers
    peer_s = _best_peer_s(kind, shape, one)
    counts = one.peer_messages or ((0, 0),) * num_layers

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
        peers=one.peers,
        peer_bytes=one.peer_bytes,
        peer_s=peer_s,
        first_s=first,
        last_s=last,
        ends_s=(0.0, sum(first), sum(last), sum(first) + sum(last)),
        least_s=min(forward[i + 1] - forward[i] + backward[i + 1] - backward[i] for i in range(num_layers)),
        memory_bytes=min((limit for limit in known if limit is not None), default=None),
        gather_s=max(speed.gather_s for speed in speeds),
        broadcast_s=max(speed.broadcast_s for speed in speeds),
    )


def _best_peer_s(kind: StageType, shape: BatchSplit, speed: Speed) -> float:
    """Give the time of a message between ranks that share experts, at best."""
    if not any(map(any, speed.peer_messages)):
        return 0.0
    pools = [shape.pools[place] for place in kind.pools]
    replicas = -(-speed.peers // (kind.tp * shape.cp))
    if replicas == 1:
        return max(pool.inside.time_s(speed.peer_bytes) for pool in pools)
    # Several replicas share experts: they may all be in one node, where one has room for them.
    links = [pool.between for pool in pools]
    links += [pool.inside for pool in pools if max(pool.rooms) >= replicas * kind.tp]
    return min(link.time_s(speed.peer_bytes) for link in links)


def peer_s(
    question: SearchProblem, shape: BatchSplit, kind: StageType, work: Work, nodes: Sequence[tuple[int, int]]
) -> float:
    """Give the time of a message between ranks that share experts, over the slowest link between any two of them.

    Args:
        question: what is asked.
        shape: of the step.
        kind: of the stage.
        work: what it costs.
        nodes: of its replicas.
    """
    ranks = kind.tp * shape.cp
    slowest = 0.0
    for start in range(0, ranks * len(nodes), work.peers):
        own = nodes[start // ranks : -(-(start + work.peers) // ranks)]
        for pair in combinations(own, 2) if len(own) > 1 else [(own[0], own[0])]:
            slowest = max(slowest, link_between(question, shape, *pair).time_s(work.peer_bytes))
    return slowest


class Works(dict[StageType, Work]):
    """What kinds of stages cost, computed when it is first asked for."""

    def __init__(self, shape: BatchSplit) -> None:
        super().__init__()
        self.shape = shape

    def __missing__(self, kind: StageType) -> Work:
        work = self[kind] = work_of(kind, self.shape)
        return work


def most_held(question: SearchProblem, shape: BatchSplit, kind: StageType, work: Work) -> int:
    """Count the layers that a kind of stage has memory for, wherever in the pipeline it holds most."""
    held, limit = shape.held_bytes, work.memory_bytes
    if held is None or limit is None:
        return question.num_layers
    # Between others a stage has no ends of the model, and keeps two microbatches at least; the last one keeps one.
    places = ((False, False, 2), (False, True, 1))

    def fits(number: int) -> bool:
        starts = range(question.num_layers - number + 1)
        size = (kind.tp, shape.num_replicas)
        return any(held(*size, start, start + number, *place) <= limit for place in places for start in starts)

    return bisect_left(range(1, question.num_layers + 1), True, key=lambda number: not fits(number))


def link_between(question: SearchProblem, shape: BatchSplit, one: tuple[int, int], other: tuple[int, int]) -> Link:
    """Give the link between two nodes, each the number of its pool and its own.

    >>> from vtp_plugin.tune.search.problem import NodePool
    >>> pools = (NodePool(name="a", rooms=(1, 1), speeds={}, between=Link(latency_s=1.0)),)
    >>> shape = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=pools)
    >>> question = SearchProblem(num_layers=1, shapes=(shape,), least_stages=1, most_stages=2)
    >>> link_between(question, shape, (0, 0), (0, 0)).latency_s, link_between(question, shape, (0, 0), (0, 1)).latency_s
    (0.0, 1.0)
    """
    first, second = shape.pools[one[0]], shape.pools[other[0]]
    if one == other:
        return first.inside
    sites = (first.site, second.site) if first.site <= second.site else (second.site, first.site)
    if sites[0] != sites[1] and sites in question.across:
        return question.across[sites]
    return max(first.between, second.between, key=lambda link: link.time_s(shape.message_bytes))


def hop_s(shape: BatchSplit, link: Link, src_tp: int, dst_tp: int) -> float:
    """Bound from below how long a message is on its way over a link, whichever transport carries it.

    >>> shape = BatchSplit(num_replicas=1, num_microbatches=1, micro_batch_size=1, pools=(), message_bytes=8)
    >>> [hop_s(shape, Link(bytes_per_s=1.0, at_once=number), 4, 2) for number in (None, 1, 2, 4)]
    [8.0, 8.0, 4.0, 4.0]
    """
    # All of the tensor crosses once at least, in as many parts as the smaller stage has ranks at best.
    parts = 1 if link.at_once is None else min(src_tp, dst_tp, link.at_once)
    return link.time_s(shape.message_bytes / parts)


def best_hop_s(question: SearchProblem, shape: BatchSplit, one: StageType, other: StageType) -> float:
    """Bound likewise between two stages, wherever they are: over the quickest link that could lie between them."""
    hops_s = []
    for place in one.pools:
        for next_place in other.pools:
            fits_one_node = place == next_place and max(shape.pools[place].rooms) >= one.tp + other.tp
            for node in (0, 1) if fits_one_node else (1,):
                link = link_between(question, shape, (place, 0), (next_place, node))
                hops_s.append(hop_s(shape, link, one.tp, other.tp))
    return min(hops_s)


def tail(question: SearchProblem, shape: BatchSplit, kind: StageType, work: Work, num_layers: int) -> float:
    """Bound from below what the first stage does after its last backward: sum gradients, and step the optimizer."""
    if shape.num_replicas * shape.cp == 1:
        return work.update_s[num_layers]
    first, last = kind.places[0], kind.places[-1]
    largest = max(shape.pools[first].rooms)
    is_one_node = first == last and largest >= shape.num_replicas * kind.tp
    link = link_between(question, shape, (first, 0), (last, 0 if is_one_node else 1))
    return work.update_s[num_layers] + gradients_s(shape, kind, work, [(0, num_layers)], link)


def gradients_s(shape: BatchSplit, kind: StageType, work: Work, parts: Sequence[tuple[int, int]], link: Link) -> float:
    """Say how long a stage sums its gradients, in rings of which a link is the slowest.

    Args:
        shape: of the step.
        kind: of the stage.
        work: what it costs.
        parts: the first layer of each of its virtual stages, and the first one behind it.
        link: of the rings.
    """
    num_ranks = shape.num_replicas * shape.cp
    dense, routed = (
        sum(sums[end] - sums[start] for start, end in parts) for sums in (work.gradient_bytes, work.expert_bytes)
    )
    copies = num_ranks * kind.tp // work.peers
    return all_reduce_s(dense, num_ranks, link) + (all_reduce_s(routed, copies, link) if copies > 1 else 0.0)
