"""Where the time of ranks went, summed up: by stages, and between sites."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.trace.explain import TimeShare, explain, sends, totals
from vtp_plugin.trace.stretches import COMPUTES, Cause, Stretch

PARTS: Mapping[str, frozenset[Cause]] = MappingProxyType(
    {
        "compute": frozenset(COMPUTES),
        "exposed communication": frozenset({Cause.PACK, Cause.POST, Cause.SEND, Cause.MESSAGE, Cause.FINISH}),
        "bubble": frozenset({Cause.BUBBLE}),
    }
)
"""The parts of a step that are told, with their causes."""
# A rank is named if it computes longer than the other ranks of its stage by this factor.
_SLOW = 1.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """The time of one stage in one step.

    Attributes:
        stage: number of the stage.
        mean_ms: for each part of the time, the mean of the stage's ranks in ms.
        slowest_ms: for each part of the time, the longest of a rank in ms.
        slowest_rank: for each part of the time, the rank with the longest.
        slow_ranks: factor by which a rank computes longer than the others of the stage, by rank as text; only where
            that is much.
    """

    stage: int
    mean_ms: Mapping[str, float]
    slowest_ms: Mapping[str, float]
    slowest_rank: Mapping[str, int]
    slow_ranks: Mapping[str, float]

    def __str__(self) -> str:
        """Write the times in one line.

        >>> ms, rank = dict.fromkeys(PARTS, 20.0), dict.fromkeys(PARTS, 3)
        >>> print(StageTimes(stage=1, mean_ms=ms, slowest_ms=ms, slowest_rank=rank, slow_ranks={}))
        stage 1: compute 20.0 ms (most: 20.0, rank 3), exposed communication 20.0 ms (most: 20.0, rank 3), \
bubble 20.0 ms (most: 20.0, rank 3)
        """
        parts = (
            f"{part} {self.mean_ms[part]:.1f} ms (most: {self.slowest_ms[part]:.1f}, rank {self.slowest_rank[part]})"
            for part in PARTS
        )
        return f"stage {self.stage}: {', '.join(parts)}"


def stage_times(shares: Sequence[TimeShare], stages: Mapping[int, int]) -> tuple[StageTimes, ...]:
    """Sum up a step by stages.

    Args:
        shares: time shares of all ranks, on one clock.
        stages: stage of each rank.
    """
    by_rank = {rank: totals(stretches) for rank, stretches in explain(shares).items()}
    own_ms = {
        part: {rank: 1e3 * sum(found.get(cause, 0.0) for cause in causes) for rank, found in by_rank.items()}
        for part, causes in PARTS.items()
    }
    return tuple(
        _sum_up(stage, [r for r in sorted(by_rank) if stages[r] == stage], own_ms)
        for stage in sorted({*stages.values()})
    )


def _sum_up(stage: int, ranks: Sequence[int], own_ms: Mapping[str, Mapping[int, float]]) -> StageTimes:
    slowest = {part: max(ranks, key=lambda rank, part=part: own_ms[part][rank]) for part in PARTS}
    return StageTimes(
        stage=stage,
        mean_ms={part: statistics.fmean(own_ms[part][rank] for rank in ranks) for part in PARTS},
        slowest_ms={part: own_ms[part][rank] for part, rank in slowest.items()},
        slowest_rank=slowest,
        slow_ranks={str(rank): factor for rank, factor in _slow({rank: own_ms["compute"][rank] for rank in ranks})},
    )


def _slow(compute_ms: Mapping[int, float]) -> Iterator[tuple[int, float]]:
    """Yield the ranks of a stage that compute much longer than the others, and by what factor.

    >>> list(_slow({3: 10.0, 4: 11.0, 5: 21.0})), list(_slow({3: 10.0}))
    ([(5, 2.0)], [])
    """
    for rank, own_ms in compute_ms.items():
        others_ms = [other_ms for other, other_ms in compute_ms.items() if other != rank]
        usual_ms = statistics.median(others_ms) if others_ms else own_ms
        if usual_ms and own_ms >= _SLOW * usual_ms:
            yield rank, own_ms / usual_ms


_WAITS = (Cause.BUBBLE, Cause.MESSAGE)
# A shorter wait tells nothing of when a message came: it may have been there already.
_LEAST_WAIT_S = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank works.

    Attributes:
        stage: stage of the rank.
        site: its site.
        network: digest that tells network namespaces apart.
    """

    stage: int
    site: str
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTraffic:
    """What a site exchanged with the others in a step, on average over the steps that were summed up.

    Attributes:
        site: name of the site.
        sent_bytes: bytes of the messages to other sites.
        received_bytes: bytes of the messages from them.
        timed_bytes: bytes of those received messages that a rank waited for, so that it is known when they came.
        timed_ms: time in which at least one of these was on its way: from when its sender sent it and its receiver was
            ready, until it was there.
        exposed_ms: time that a stage waited for another site, by stage as text, of the rank that waited longest.
        on_way_ms: the part of that after the other site had sent.
        num_resent: TCP segments that the network namespaces of the ranks that exchange these messages sent again; None
            where a system does not tell.
    """

    site: str
    sent_bytes: int
    received_bytes: int
    timed_bytes: int
    timed_ms: float
    exposed_ms: Mapping[str, float]
    on_way_ms: Mapping[str, float]
    num_resent: int | None = None

    @property
    def goodput_mbit(self) -> float | None:
        """Megabits per second at which messages came; None where no rank waited for one.

        >>> shown = {"exposed_ms": {}, "on_way_ms": {}, "sent_bytes": 0, "received_bytes": 1_000_000}
        >>> SiteTraffic(site="edge", timed_bytes=500_000, timed_ms=40.0, **shown).goodput_mbit
        100.0
        """
        return 8e-3 * self.timed_bytes / self.timed_ms if self.timed_ms else None

    def __str__(self) -> str:
        """Write it in one line.

        >>> waits = {"exposed_ms": {"0": 12.0, "2": 0.5}, "on_way_ms": {"0": 4.0, "2": 0.5}}
        >>> print(SiteTraffic(site="edge", sent_bytes=65536, received_bytes=32768, timed_bytes=32768, timed_ms=4.0,
        ...                   num_resent=1, **waits))
        edge: sent 65,536 bytes, received 32,768 bytes at 65.5 Mbit/s; stage 0 waited 12.0 ms (4.0 on the way), \
stage 2 waited 0.5 ms (0.5 on the way); TCP segments sent again: 1
        """
        rate = "" if self.goodput_mbit is None else f" at {self.goodput_mbit:.1f} Mbit/s"
        waits = ", ".join(
            f"stage {stage} waited {total_ms:.1f} ms ({self.on_way_ms[stage]:.1f} on the way)"
            for stage, total_ms in self.exposed_ms.items()
        )
        resent = "" if self.num_resent is None else f"TCP segments sent again: {self.num_resent}"
        crossed = f"{self.site}: sent {self.sent_bytes:,} bytes, received {self.received_bytes:,} bytes{rate}"
        return "; ".join(part for part in (crossed, waits, resent) if part)

    def values(self) -> Iterator[tuple[str, float]]:
        """Yield the figures with their names, for writers such as TensorBoard."""
        yield f"{self.site} sent (bytes)", self.sent_bytes
        yield f"{self.site} received (bytes)", self.received_bytes
        if self.goodput_mbit is not None:
            yield f"{self.site} goodput (Mbit/s)", self.goodput_mbit
        for stage, total_ms in self.exposed_ms.items():
            yield f"stage {stage} exposed (ms)", total_ms
            yield f"stage {stage} exposed, on the way (ms)", self.on_way_ms[stage]
        if self.num_resent is not None:
            yield f"{self.site} resent (segments)", self.num_resent


def traffic_between(steps: Sequence[Sequence[TimeShare]], places: Mapping[int, RankPlace]) -> tuple[SiteTraffic, ...]:
    """Sum up what crossed between sites.

    Args:
        steps: for each step the time shares of all ranks, on one clock.
        places: place of each rank.

    Returns:
        The traffic of every site, by name; empty where all ranks are at one site.
    """
    sites = sorted({place.site for place in places.values()})
    if len(sites) < 2 or not steps:
        return ()
    sums = {site: _Sums() for site in sites}
    for shares in steps:
        _add_step(shares, places, sums)
    return tuple(sums[site].mean(site, len(steps)) for site in sites)


class _Sums:
    """The sums of one site over some steps."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.timed_bytes = 0
        self.timed_s = 0.0
        self.exposed_s: defaultdict[int, float] = defaultdict(float)
        self.on_way_s: defaultdict[int, float] = defaultdict(float)
        self.resent: list[int | None] = []

    def mean(self, site: str, num_steps: int) -> SiteTraffic:
        known = [each for each in self.resent if each is not None]
        return SiteTraffic(
            site=site,
            sent_bytes=round(self.sent_bytes / num_steps),
            received_bytes=round(self.received_bytes / num_steps),
            timed_bytes=round(self.timed_bytes / num_steps),
            timed_ms=1e3 * self.timed_s / num_steps,
            exposed_ms={str(stage): 1e3 * each_s / num_steps for stage, each_s in sorted(self.exposed_s.items())},
            on_way_ms={str(stage): 1e3 * each_s / num_steps for stage, each_s in sorted(self.on_way_s.items())},
            num_resent=round(sum(known) / num_steps) if known and len(known) == len(self.resent) else None,
        )


def _add_step(shares: Sequence[TimeShare], places: Mapping[int, RankPlace], sums: Mapping[str, _Sums]) -> None:
    """Add one step of all ranks to the sums of the sites."""
    crossing = _crossing(shares, places)
    for share in shares:
        own = sums[places[share.rank].site]
        for one in share.stretches:
            if one.name in crossing:
                own.sent_bytes += one.num_bytes * (one.cause is Cause.SEND)
                own.received_bytes += one.num_bytes * (one.cause is Cause.POST)
    for site, each in sums.items():
        num_bytes, length_s = _timed([share for share in shares if places[share.rank].site == site], shares, crossing)
        each.timed_bytes += num_bytes
        each.timed_s += length_s
        each.resent += _resent(shares, places, site, crossing)
    longest: dict[int, tuple[float, float]] = {}
    for rank, stretches in explain(shares).items():
        waits = [one for one in stretches if one.cause in _WAITS and one.name in crossing]
        if waits:
            found = (
                sum(one.length_s for one in waits),
                sum(one.length_s for one in waits if one.cause is Cause.MESSAGE),
            )
            longest[places[rank].stage] = max(found, longest.get(places[rank].stage, found))
    site_of = {place.stage: place.site for place in places.values()}
    for stage, (total_s, on_way_s) in longest.items():
        sums[site_of[stage]].exposed_s[stage] += total_s
        sums[site_of[stage]].on_way_s[stage] += on_way_s


def _crossing(shares: Sequence[TimeShare], places: Mapping[int, RankPlace]) -> frozenset[str]:
    """List the names of what ranks of several sites send or receive."""
    sites: defaultdict[str, set[str]] = defaultdict(set)
    for share in shares:
        for one in share.stretches:
            if one.cause in (Cause.SEND, Cause.POST) and one.num_bytes:
                sites[one.name].add(places[share.rank].site)
    return frozenset(name for name, found in sites.items() if len(found) > 1)


def _timed(receivers: Sequence[TimeShare], shares: Sequence[TimeShare], crossing: frozenset[str]) -> tuple[int, float]:
    """Sum up the messages of which it is known when they came: bytes, and seconds in which any was on its way."""
    sent_s, num_bytes = sends(shares), 0
    ways: list[tuple[float, float]] = []
    for share in receivers:
        posts: defaultdict[str, list[Stretch]] = defaultdict(list)
        waits: dict[str, Stretch] = {}
        for one in share.stretches:
            if one.name not in crossing or one.name not in sent_s:
                continue
            if one.cause is Cause.POST:
                posts[one.name].append(one)
            elif one.cause is Cause.WAIT:
                waits[one.name] = one  # a header's wait comes before that of its tensor
        for name, own in posts.items():
            begun_s = max(min(sent_s[name].values()), own[0].end_s)
            if name in waits and waits[name].length_s >= _LEAST_WAIT_S and waits[name].end_s > begun_s:
                ways.append((begun_s, waits[name].end_s))
                num_bytes += sum(one.num_bytes for one in own)
    return num_bytes, _covered_s(ways)


def _covered_s(ways: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one of some intervals.

    >>> _covered_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    covered_s, until_s = 0.0, float("-inf")
    for start_s, end_s in sorted(ways):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def _resent(
    shares: Sequence[TimeShare], places: Mapping[int, RankPlace], site: str, crossing: frozenset[str]
) -> list[int | None]:
    """List, for each network namespace of a site from which messages cross, the segments that it sent again."""
    found: dict[str, int | None] = {}
    for share in shares:
        place = places[share.rank]
        if place.site == site and any(one.name in crossing and one.num_bytes for one in share.stretches):
            # Ranks of one namespace read the same counter, at times that are a little apart.
            known = found.get(place.network)
            found[place.network] = share.num_resent if known is None else max(known, share.num_resent or 0)
    return [*found.values()]
