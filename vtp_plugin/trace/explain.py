"""Explains what each rank spent a step on: no time counts twice, and a wait is explained by the other side."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.trace.stretches import Cause, RankStep, Stretch

# What an evaluation or a save does inside is its own.
_WHOLE = frozenset({Cause.EVALUATE, Cause.SAVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """The time of one rank in one step.

    Attributes:
        rank: rank of the run; in a plan the worker.
        worker: worker of the rank in the schedules.
        start_s: second at which the step begins, on the common clock.
        end_s: second at which it ends.
        stretches: stretches that the rank recorded in it.
        num_resent: TCP segments that the rank's network namespace sent again in it; None where nobody counts.
    """

    rank: int
    worker: int
    start_s: float
    end_s: float
    stretches: tuple[Stretch, ...]
    num_resent: int | None = None

    @property
    def length_s(self) -> float:
        """Seconds that the step takes."""
        return self.end_s - self.start_s


def on_one_clock(step: RankStep, *, rank: int, worker: int, offset_s: Callable[[float], float]) -> TimeShare:
    """Convert a step to the clock of rank 0.

    Args:
        step: the step by the rank's own clock.
        rank: the rank that ran it.
        worker: worker of the rank.
        offset_s: gives what is to be added to a time of the rank's clock.
    """

    def shift(at_s: float) -> float:
        return at_s + offset_s(at_s)

    return TimeShare(
        rank=rank,
        worker=worker,
        start_s=shift(step.start_s),
        end_s=shift(step.end_s),
        stretches=tuple(replace(s, start_s=shift(s.start_s), end_s=shift(s.end_s)) for s in step.stretches),
        num_resent=step.num_resent,
    )


def flatten(share: TimeShare) -> list[Stretch]:
    """Cut a step into stretches that follow one another without a gap: time without a record is ``OTHER``.

    >>> noted = (Stretch(cause=Cause.BATCH, name="", start_s=1.0, end_s=2.0),
    ...          Stretch(cause=Cause.FORWARD, name="0F0", start_s=0.5, end_s=4.0))
    >>> for one in flatten(TimeShare(rank=0, worker=0, start_s=0.0, end_s=5.0, stretches=noted)):
    ...     print(one.cause, one.start_s, one.end_s)
    other 0.0 0.5
    forward 0.5 1.0
    batch 1.0 2.0
    forward 2.0 4.0
    other 4.0 5.0
    """
    flat: list[Stretch] = []
    around = [Stretch(cause=Cause.OTHER, name="", start_s=share.start_s, end_s=share.end_s)]
    now_s = share.start_s

    def spend(until_s: float) -> None:
        nonlocal now_s
        if until_s > now_s:
            flat.append(replace(around[-1], start_s=now_s, end_s=until_s))
            now_s = until_s

    for one in sorted(share.stretches, key=lambda stretch: (stretch.start_s, -stretch.end_s)):
        while len(around) > 1 and around[-1].end_s <= one.start_s:
            spend(around[-1].end_s)
            around.pop()
        spend(min(one.start_s, share.end_s))
        whole = around[-1] if around[-1].cause in _WHOLE else one
        around.append(replace(whole, end_s=min(one.end_s, around[-1].end_s)))
    while around:
        spend(around[-1].end_s)
        around.pop()
    return flat


def sends(shares: Sequence[TimeShare]) -> dict[str, dict[int, float]]:
    """For each message list the ranks that send it, with the second at which each begins to."""
    begun_s: dict[str, dict[int, float]] = defaultdict(dict)
    for share in shares:
        for one in share.stretches:
            if one.cause is Cause.SEND:
                begun_s[one.name].setdefault(share.rank, one.start_s)
    return begun_s


def sender(begun_s: Mapping[int, float], rank: int, until_s: float) -> int | None:
    """Find the rank that began last to send what a rank waited for: waits for several ranks come in turn.

    Args:
        begun_s: second at which each sender began.
        rank: rank that waited.
        until_s: second at which its wait ended.

    Returns:
        The sender; None where nobody is known to send it, or where the rank itself does.

    >>> [sender({0: 4.0, 1: 6.0}, 2, until_s) for until_s in (8.0, 5.0, 3.0)], sender({0: 4.0, 1: 6.0}, 1, 8.0)
    ([1, 0, 0], None)
    """
    if not begun_s or rank in begun_s:
        return None
    known = [other for other, start_s in begun_s.items() if start_s <= until_s]
    # By clocks that are a little apart all may seem to begin later.
    return max(known, key=lambda other: begun_s[other]) if known else min(begun_s, key=lambda other: begun_s[other])


def arrivals(shares: Sequence[TimeShare]) -> Iterator[tuple[TimeShare, Stretch, int, float]]:
    """Yield each wait for what others send: the receiver, the wait, which rank sent it, and when that began to."""
    sent = sends(shares)
    for share in shares:
        for one in share.stretches:
            begun_s = sent.get(one.name, {})
            if one.cause is Cause.WAIT and (rank := sender(begun_s, share.rank, one.end_s)) is not None:
                yield share, one, rank, begun_s[rank]


def explain(shares: Sequence[TimeShare]) -> dict[int, list[Stretch]]:
    """Explain the time of all ranks in one step, without a gap.

    A wait for a message is ``BUBBLE`` until the rank that it waits for has begun to send it, and ``MESSAGE`` after
    that. So is a finish, until the message has come to the ranks of the stage. A wait until a message has left is
    ``MESSAGE``.

    Args:
        shares: time shares of all ranks, on one clock.

    Returns:
        The stretches of each rank, by rank.
    """
    sent = sends(shares)

    def sent_s(receiver: int, one: Stretch) -> float | None:
        begun_s = sent.get(one.name, {})
        rank = sender(begun_s, receiver, one.end_s)
        return None if rank is None else begun_s[rank]

    come_s: dict[tuple[int, str], float] = {}
    for share, wait, *_ in arrivals(shares):
        key = share.worker, wait.name
        come_s[key] = max(wait.end_s, come_s.get(key, wait.end_s))
    return {
        share.rank: [
            part
            for one in flatten(share)
            for part in _parts(
                one,
                sent_s=sent_s(share.rank, one),
                come_s=come_s.get((share.worker, one.name)),
            )
        ]
        for share in shares
    }


def _parts(one: Stretch, *, sent_s: float | None, come_s: float | None) -> Iterator[Stretch]:
    """Split a wait or a finish by when its message was sent, and when it had come."""
    if one.cause not in (Cause.WAIT, Cause.FINISH):
        yield one
        return
    bubble_s = one.start_s if sent_s is None else min(max(sent_s, one.start_s), one.end_s)
    message_s = one.end_s if one.cause is Cause.WAIT else min(max(come_s or bubble_s, bubble_s), one.end_s)
    cuts = (
        (Cause.BUBBLE, one.start_s, bubble_s),
        (Cause.MESSAGE, bubble_s, message_s),
        (Cause.FINISH, message_s, one.end_s),
    )
    for cause, start_s, end_s in cuts:
        if end_s > start_s:
            yield replace(one, cause=cause, start_s=start_s, end_s=end_s)


def totals(stretches: Iterable[Stretch]) -> Mapping[Cause, float]:
    """Add up the seconds of each cause."""
    by_cause: dict[Cause, float] = defaultdict(float)
    for one in stretches:
        by_cause[one.cause] += one.length_s
    return by_cause
