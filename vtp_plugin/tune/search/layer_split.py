"""Share out the layers between stages in a fixed order: dynamic programming over stages and layers.

Where cards count, no stage may compute for longer than the busiest one must: layers are in proportion to the cards.

What is minimized is a lower bound on a step of 1F1B, tight where stages are equal. Stage i of p, with forward f_i and
backward b_i, t_i = f_i + b_i, may have w_i = min(p - i, m) of m microbatches in flight. What is before it takes P_i, a
microbatch that leaves it comes back after R_i. It computes for m t_i. Until its first backward it runs at most w_i
forwards, so it idles at least R_i - (w_i - 1) f_i; after its last forward at most w_i - 1 backwards are left, so it
idles at least R_i - (w_i - 1) b_i. With m > w_i both add up:

    step >= P_i + m t_i + max(0, R_i - (w_i - 1) f_i) + max(0, R_i - (w_i - 1) b_i)

Between sites a planned order may have more in flight (:mod:`~vtp_plugin.tune.search.in_flight`): there w_i is m.

The first stage is the last one to end, so what it does with its gradients then comes on top: P_1 begins with that.

As stages are added, R_i grows and P_i stays: of all stages so far, four numbers say what the bound will be, and of two
beginnings with the same layers, one that is not better in any of the four is dropped. A step is longer than its bound,
though, and not always by as much: so what was dropped is looked at once more, when it is known what is short enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vtp_plugin.tune.search.boundary_cost import least_together_s
from vtp_plugin.tune.search.memory_check import held_by
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem, StageType
from vtp_plugin.tune.search.stage_cost import Work, best_hop_s, tail

# Beginnings nearer to each other than this are taken for one.
_NEAR = 1e-4
# Of the time of the busiest stage; no two numbers of layers are so near to each other.
_LITTLE = 1e-6


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Layers of every stage.

    Attributes:
        bound_s: no step is shorter.
        layers: of every stage.
    """

    bound_s: float
    layers: tuple[int, ...]


class _Begin(NamedTuple):
    """A beginning of the pipeline.

    ``before_s`` is P of the next stage; ``still_s``, ``once_s`` and ``twice_s`` are the largest bounds of the stages so
    far of which the last takes in R once or twice, without what is to come of it.
    """

    before_s: float
    still_s: float
    once_s: float
    twice_s: float
    layers: tuple[int, ...]

    def least_s(self, to_come_s: float) -> float:
        return max(self.still_s, self.once_s + to_come_s, self.twice_s + 2 * to_come_s)

    def is_no_better(self, other: _Begin, near_s: float) -> bool:
        return (
            self.before_s >= other.before_s - near_s
            and self.still_s >= other.still_s - near_s
            and self.once_s >= other.once_s - near_s
            and self.twice_s >= other.twice_s - near_s
        )


_START = _Begin(0.0, 0.0, -math.inf, -math.inf, ())


def split(
    question: SearchProblem,
    shape: BatchSplit,
    kinds: Sequence[StageType],
    works: Sequence[Work],
    below_s: float,
    *,
    most_alike: int = 1,
) -> list[Split]:
    """Find the layers with the least bound, and others that may be as good.

    Args:
        question: what is asked.
        shape: of the step.
        kinds: of the stages, in order.
        works: what each costs.
        below_s: only steps that may be shorter count.
        most_alike: a beginning is dropped where so many others are no worse.

    Returns:
        Those with the least bound first; none if no step can be shorter, or the memory is too small.
    """
    more_s = _together_s(question, kinds, works)
    most_s = below_s / shape.num_microbatches
    if question.objective == "cards":
        most_s = _quickest_s(question, shape, kinds, works, more_s)
        if most_s == math.inf:
            return []
        # No step is longer where links take no time.
        below_s = min(below_s, (shape.num_microbatches + len(kinds)) * most_s)
    every = (_Stages(question, shape, kinds, works, more_s, most_s, number) for number in _numbers(question, kinds))
    return sorted(one for stages in every for one in _least(stages, below_s, most_alike))


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages in order, and what each may hold.

    Attributes:
        question: what is asked.
        shape: of the step.
        kinds: of the stages.
        works: what each costs.
        more_s: what each does at least for its boundaries, forward and backward.
        most_s: each computes for less than that, for a microbatch.
        number: layers of every stage between the first and the last; None for any. Where all hold as many, also theirs.
    """

    question: SearchProblem
    shape: BatchSplit
    kinds: Sequence[StageType]
    works: Sequence[Work]
    more_s: Sequence[tuple[float, float]]
    most_s: float
    number: int | None = None

    def ends(self, stage: int, start: int) -> Iterator[tuple[int, tuple[float, float]]]:
        """Yield where a stage can end that begins at a layer, and what it computes forward and backward then."""
        num_stages, work, more = len(self.kinds), self.works[stage], self.more_s[stage]
        num_after = num_stages - stage - 1
        last = self.question.num_layers - num_after
        ends = range(start + 1, last + 1) if num_after else range(last, last + 1)
        if self.number is not None and num_after and (stage or self.question.layers == "equal"):
            ends = range(start + self.number, min(start + self.number, last) + 1)
        for end in ends:
            forward, backward = work.times_s(start, end, is_first=not stage, is_last=not num_after)
            times = (forward + more[0], backward + more[1])
            if sum(times) >= self.most_s:
                return
            if not _has_room(self.shape, self.kinds[stage], work, (start, end), (stage, num_stages)):
                return
            yield end, times


def _numbers(question: SearchProblem, kinds: Sequence[StageType]) -> Sequence[int | None]:
    """List what stages between the first and the last may hold: any layers, or each as many."""
    num_between = len(kinds) - 2
    if question.layers == "equal":
        number, left = divmod(question.num_layers, len(kinds))
        return () if left else (number,)
    if question.layers == "any" or num_between < 2:
        return (None,)
    return range(1, (question.num_layers - 2) // num_between + 1)


def _together_s(
    question: SearchProblem, kinds: Sequence[StageType], works: Sequence[Work]
) -> list[tuple[float, float]]:
    """Bound what every stage does for its boundaries, forward and backward."""
    found = [(0.0, 0.0)] * len(kinds)
    if any(work.gather_s or work.broadcast_s for work in works):
        sizes = [(kind.tp, work) for kind, work in zip(kinds, works, strict=True)]
        for stage, pair in enumerate(pairwise(sizes)):
            row = least_together_s(question, *pair)
            for end, more in ((stage, row[:2]), (stage + 1, row[2:])):
                found[end] = (found[end][0] + more[0], found[end][1] + more[1])
    return found


def _quickest_s(
    question: SearchProblem,
    shape: BatchSplit,
    kinds: Sequence[StageType],
    works: Sequence[Work],
    more_s: Sequence[tuple[float, float]],
) -> float:
    """Say for how long the busiest stage computes if that is as short as can be, and a little; inf if nothing fits."""

    def fits(most_s: float) -> bool:
        for number in _numbers(question, kinds):
            stages, starts = _Stages(question, shape, kinds, works, more_s, most_s, number), {0}
            for stage in range(len(kinds)):
                starts = {end for start in starts for end, _ in stages.ends(stage, start)}
            if starts:
                return True
        return False

    # As if layers could be cut; with a layer more for each stage there is room for all, if it is only time that counts.
    rate = sum(1 / work.least_s for work in works)
    least, most = question.num_layers / rate, 2 * (question.num_layers + len(kinds)) / rate
    if not fits(most):
        least, most = (
            most,
            2 * sum(sum(work.times_s(0, question.num_layers, is_first=True, is_last=True)) for work in works),
        )
        if not fits(most):
            return math.inf
    while most - least > _LITTLE * most:
        middle = (least + most) / 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def _least(stages: _Stages, below_s: float, most_alike: int) -> list[Split]:
    question, shape, kinds, works = stages.question, stages.shape, stages.kinds, stages.works
    num_stages, num_layers = len(kinds), question.num_layers
    hops_s = _hops(question, shape, kinds)
    # What is still to come after each stage, at best.
    rates, hops_left, least = [0.0], [0.0], [math.inf]
    for work, hop in zip(reversed(works[1:]), reversed(hops_s[1:]), strict=True):
        rates.append(rates[-1] + 1 / work.least_s)
        hops_left.append(hops_left[-1] + hop)
        least.append(min(least[-1], work.least_s))
    rates, hops_left, least = rates[::-1], hops_left[::-1], least[::-1]
    near_s = _NEAR * below_s if most_alike == 1 and below_s < math.inf else 0.0
    begins: dict[int, list[_Begin]] = {0: [_START]}
    for stage, (kind, work) in enumerate(zip(kinds, works, strict=True)):
        grown: dict[int, list[_Begin]] = {}
        num_after = num_stages - stage - 1
        in_flight = _in_flight(question, shape, num_after)
        for start, row in begins.items():
            first_s = min(begin.before_s for begin in row)
            for end, times in stages.ends(stage, start):
                left = num_layers - end
                to_come_s = hops_left[stage] + (left * least[stage] if left else 0.0)
                rest_s = shape.num_microbatches * left / rates[stage] if left else 0.0
                tail_s = 0.0 if stage else tail(question, shape, kind, work, end)
                if first_s + tail_s + sum(times) + hops_s[stage] + rest_s >= below_s:
                    continue
                for begin in row:
                    new = _add(begin, times, hops_s[stage], in_flight, shape.num_microbatches, end - start, tail_s)
                    if new.before_s + rest_s < below_s and new.least_s(to_come_s) < below_s:
                        _keep(grown.setdefault(end, []), new, near_s, most_alike)
        begins = grown
    return sorted(Split(begin.least_s(0.0), begin.layers) for begin in begins.get(num_layers, ()))


def _hops(question: SearchProblem, shape: BatchSplit, kinds: Sequence[StageType]) -> list[float]:
    """Give the time of the two messages behind every stage, at best."""
    return [*(2 * best_hop_s(question, shape, *pair) for pair in pairwise(kinds)), 0.0]


def _has_room(shape: BatchSplit, kind: StageType, work: Work, layers: tuple[int, int], place: tuple[int, int]) -> bool:
    """Whether a stage's cards can hold its layers; its place is its number, and the number of stages."""
    if work.memory_bytes is None:
        return True
    stage, num_stages = place
    ends = {"is_first": stage == 0, "is_last": stage == num_stages - 1}
    return held_by(shape, kind, layers, num_stages - stage, **ends) <= work.memory_bytes


def _in_flight(question: SearchProblem, shape: BatchSplit, num_after: int) -> int:
    """Say how many microbatches a stage may have in flight at most, with so many stages behind it."""
    return shape.num_microbatches if question.runs_ahead else min(num_after + 1, shape.num_microbatches)


def _add(
    begin: _Begin,
    times_s: tuple[float, float],
    hop_s: float,
    in_flight: int,
    num_microbatches: int,
    num_layers: int,
    tail_s: float,
) -> _Begin:
    """Add a stage, and the link behind it."""
    # Without function calls: this is asked millions of times.
    forward, backward = times_s
    both = forward + backward
    before_s = begin.before_s + tail_s
    own = before_s + num_microbatches * both
    least, most = (in_flight - 1) * forward, (in_flight - 1) * backward
    if most < least:
        least, most = most, least
    still_s = begin.still_s
    once_s, other = begin.once_s + both, own - least
    twice_s = begin.twice_s + 2 * both
    if num_microbatches > in_flight:
        # With all microbatches in flight at once the two times of idling may be one.
        twice_s = max(twice_s, other - most)
    return _Begin(
        before_s + both + hop_s,
        own if own > still_s else still_s,
        (other if other > once_s else once_s) + hop_s,
        twice_s + 2 * hop_s,
        (*begin.layers, num_layers),
    )


def _keep(row: list[_Begin], new: _Begin, near_s: float, most_alike: int) -> None:
    """Add a beginning to those with as many layers, unless so many are as good; drop those that it alone beats."""
    as_good = 0
    for old in row:
        as_good += new.is_no_better(old, near_s)
        if as_good == most_alike:
            return
    if most_alike == 1:
        row[:] = [old for old in row if not old.is_no_better(new, near_s)]
    row.append(new)
