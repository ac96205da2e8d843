"""Time the links between the machines of a run: inside a node, between nodes, between sites."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import TypeVar

import torch
import torch.distributed as dist

from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.collectives import settle
from vtp_plugin.tune.cluster.machines import Links, Location
from vtp_plugin.tune.cluster.speed import Link

_SMALL_BYTES, _LARGE_BYTES = 8, 4 << 20
_NUM_WARM, _NUM_SMALL, _NUM_LARGE = 3, 50, 10
# So many links of each kind are timed, of which the slowest counts, and so many cards of a node send at once.
_MOST_TRIES, _MOST_AT_ONCE = 3, 8
_PAUSE_S = 0.01
# A stage hardly has more ranks than this.
_MOST_SUMMED = 8
_Value = TypeVar("_Value")
LinkName = tuple[str, ...]
"""``inside`` and a kind of card; ``between`` and a kind, or a site where nodes are of two kinds or of none with a name;
``across`` and two sites in order."""


def choose_pairs(locations: Sequence[Location]) -> dict[LinkName, list[tuple[tuple[int, int], ...]]]:
    """Choose pairs of ranks for each kind of link: pairs without a common rank, for each of some nodes or node pairs.

    Args:
        locations: node, site and kind of card of every rank, in rank order.

    >>> locations = [Location(node=node, site="", kind="") for node in "aabb"]
    >>> choose_pairs(locations)
    {('inside', ''): [((0, 1),), ((2, 3),)], ('between', ''): [((0, 2), (1, 3))]}
    >>> kinds = {"a": "new", "b": "new", "c": "old"}
    >>> [*choose_pairs([Location(node=node, site="x", kind=kind) for node, kind in kinds.items()])]
    [('between', 'new'), ('between', 'x')]
    """
    nodes: defaultdict[str, list[int]] = defaultdict(list)
    for rank, location in enumerate(locations):
        nodes[location.node].append(rank)
    chosen: defaultdict[LinkName, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
    for one, other in combinations_with_replacement(nodes.values(), 2):
        first, second = locations[one[0]], locations[other[0]]
        if one is other:
            name: LinkName = ("inside", first.kind)
        elif first.site == second.site:
            name = ("between", (first.kind if first.kind == second.kind else "") or first.site)
        else:
            name = ("across", *sorted((first.site, second.site)))
        pairs = zip(one[::2], one[1::2], strict=False) if one is other else zip(one, other, strict=False)
        if found := tuple(pairs)[:_MOST_AT_ONCE]:
            chosen[name].append(found)
    return {name: tries[:_MOST_TRIES] for name, tries in chosen.items()}


def slowest_links(links: Mapping[LinkName, Sequence[Link]]) -> Links:
    """Take the slowest of each kind, and the fewest cards that send at once.

    >>> links = [Link(latency_s=1.0, bytes_per_s=8.0, at_once=2), Link(latency_s=2.0, bytes_per_s=4.0)]
    >>> slowest_links({("inside", ""): links}).inside[""]
    Link(latency_s=2.0, bytes_per_s=4.0, at_once=2)
    """
    slowest = {}
    for name, each in links.items():
        known = [link.at_once for link in each if link.at_once is not None]
        link = max(each, key=lambda link: link.time_s(_LARGE_BYTES))
        slowest[name] = dataclasses.replace(link, at_once=min(known, default=None))

    def of(kind: str) -> dict[str, Link]:
        return {name[1]: link for name, link in slowest.items() if name[0] == kind}

    across = {(name[1], name[2]): link for name, link in slowest.items() if name[0] == "across"}
    return Links(inside=of("inside"), between=of("between"), across=across)


def choose_summed(locations: Sequence[Location]) -> dict[str, tuple[int, ...]]:
    """Choose the ranks of one node for each kind of card: the node with the most of them.

    >>> locations = [Location(node=node, site="", kind="new") for node in "abb"]
    >>> choose_summed(locations)
    {'new': (1, 2)}
    """
    nodes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, location in enumerate(locations):
        nodes[location.kind, location.node].append(rank)
    chosen: dict[str, tuple[int, ...]] = {}
    for (kind, _), ranks in nodes.items():
        if len(ranks) > max(1, len(chosen.get(kind, ()))):
            chosen[kind] = tuple(ranks[:_MOST_SUMMED])
    return chosen


def time_links(platform: Platform, location: Location) -> Links | None:
    """Time the links between all ranks of the default group; a collective call, while nothing else is under way.

    The group may be destroyed right afterwards.

    Args:
        platform: platform of this rank.
        location: node, site and kind of card of this rank.

    Returns:
        The links on rank 0; None on other ranks.
    """
    locations = _gather_all(location)
    links: dict[LinkName, list[Link]] = {}
    for name, pairs in choose_pairs(locations).items():
        links[name] = [_time_pairs(each, platform) for each in pairs]
    sums: dict[str, dict[int, Link]] = {}
    for kind, ranks in choose_summed(locations).items():
        for number in range(2, len(ranks) + 1):
            if (link := _gather_all(_time_sum(ranks[:number], platform))[ranks[0]]) is not None:
                sums.setdefault(kind, {})[number] = link
    settle(platform)
    return dataclasses.replace(slowest_links(links), sums=sums) if dist.get_rank() == 0 else None


def _time_pairs(pairs: Sequence[tuple[int, int]], platform: Platform) -> Link:
    """Send back and forth between two ranks, then between all pairs at once. All ranks call it."""
    own = next((pair for pair in pairs if dist.get_rank() in pair), None)
    alone_s = (0.0, 0.0)
    if own is not None and own == pairs[0]:
        latency_s = _one_way_s(own, platform, _SMALL_BYTES, _NUM_SMALL)
        alone_s = latency_s, _one_way_s(own, platform, _LARGE_BYTES, _NUM_LARGE)
    # All ranks learn what the first of the pair has timed, and so wait for it.
    latency_s, large_s = _gather_all(alone_s)[pairs[0][0]]
    link = _link(latency_s, large_s)
    if len(pairs) == 1:
        return link
    if own is not None:
        _one_way_s(own, platform, _SMALL_BYTES, 1)  # the first message of two ranks takes longer
    dist.barrier()
    together_s = max(_gather_all(0.0 if own is None else _one_way_s(own, platform, _LARGE_BYTES, _NUM_LARGE)))
    share = _link(latency_s, together_s).bytes_per_s / link.bytes_per_s
    return dataclasses.replace(link, at_once=num_at_once(len(pairs), share))


def num_at_once(num_pairs: int, share: float) -> int:
    """Return how many cards can send at full speed at once.

    Args:
        num_pairs: number of pairs that sent at once.
        share: speed of the slowest pair then, divided by that of one pair alone.

    >>> [num_at_once(4, share) for share in (1.02, 0.95, 0.7, 0.26, 0.01)]
    [4, 4, 3, 1, 1]
    """
    # A little less than full speed is noise.
    return min(num_pairs, max(1, int(num_pairs * share + 0.25)))


def _gather_all(value: _Value) -> list[_Value]:
    """Gather an object from every rank, in rank order (``all_gather_object``)."""
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _time_sum(ranks: Sequence[int], platform: Platform) -> Link | None:
    """Time the sum of a small and of a large tensor over some ranks; None on the others. All ranks call it."""
    group = dist.new_group([*ranks])
    if not isinstance(group, dist.ProcessGroup):
        return None

    # Ranks that compute between two sums come at different times, and on a host they sleep in between.
    pause_s = _PAUSE_S if platform.host_blocking_wait else 0.0

    def took_s(num_bytes: int, number: int) -> float:
        tensor = torch.zeros(num_bytes // 4, device=platform.device())
        each_s = _rounds_s(lambda: dist.all_reduce(tensor, group=group), number, platform, pause_s=pause_s)
        # A layer waits for several sums: where a few of them take long, as on a busy host, they count by their share.
        return statistics.mean(each_s)

    return _link(took_s(_SMALL_BYTES, _NUM_SMALL), took_s(_LARGE_BYTES, _NUM_LARGE))


def _link(small_s: float, large_s: float) -> Link:
    """Return the link with these times of a small and a large message; on a busy machine the two may be equal.

    >>> _link(1.0, 3.0).bytes_per_s == _LARGE_BYTES / 2.0, _link(3.0, 2.0).bytes_per_s == _LARGE_BYTES / 0.1
    (True, True)
    """
    return Link(latency_s=small_s, bytes_per_s=_LARGE_BYTES / max(large_s - small_s, large_s / 20))


def _one_way_s(pair: tuple[int, int], platform: Platform, num_bytes: int, number: int) -> float:
    """Return half of the median round trip, in seconds."""
    tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=platform.device())
    is_first = dist.get_rank() == pair[0]
    peer = pair[is_first]

    def go_and_return() -> None:
        for sends in (is_first, not is_first):
            dist.send(tensor, peer) if sends else dist.recv(tensor, peer)

    return statistics.median(_rounds_s(go_and_return, number, platform)) / 2


def _rounds_s(act: Callable[[], object], number: int, platform: Platform, *, pause_s: float = 0.0) -> list[float]:
    """Return the times of several rounds in seconds, each after a pause; the first rounds do not count."""
    took_s = []
    for _ in range(_NUM_WARM + number):
        if pause_s:
            time.sleep(pause_s)
        begin_s = time.perf_counter()
        act()
        platform.module().synchronize()
        took_s.append(time.perf_counter() - begin_s)
    return took_s[_NUM_WARM:]
