"""Splits the layers between stages in a fixed order: dynamic programming over stages and layers.

With the objective ``cards`` no stage may compute for longer than the busiest one must: layers are in proportion to the
cards.

What is minimized is a lower bound on a step of 1F1B, tight where stages are equal. Stage i of p, with forward f_i and
backward b_i, t_i = f_i + b_i, may have w_i = min(p - i, m) of m microbatches in flight. What is before it takes P_i, a
microbatch that leaves it comes back after R_i. It computes for m t_i. Until its first backward it runs at most w_i
forwards, so it idles at least R_i - (w_i - 1) f_i; after its last forward at most w_i - 1 backwards are left, so it
idles at least R_i - (w_i - 1) b_i. With m > w_i both add up:

    step >= P_i + m t_i + max(0, R_i - (w_i - 1) f_i) + max(0, R_i - (w_i - 1) b_i)

Between sites a planned order may have more in flight (:mod:`~vtp_plugin.tune.search.stage_cost`): there w_i is m.

With split backwards, whose gradients of weights take g_i of b_i, any stage may keep as many as the first until g is
done: w_i = min(p, m). What comes back to a stage has taken f_j + b_j - g_j on each later one. Nobody waits for the last
g of a stage, so P_i is only what a microbatch takes on its way to the stage.

With whole backwards the first stage is the last one to end, so what it does with its gradients then comes on top: P_1
begins with that.

As stages are added, R_i grows and P_i stays. So four numbers per beginning (:class:`_Beginning`) give the bound of the
whole, and of two beginnings with equally many layers, one that is better in none of the four is dropped. But a step is
longer than its bound, and not always by as much: once it is known what is short enough, the layers are split again with
fewer dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from vtp_plugin.tune.search.problem import SearchProblem, SearchSpace, StageType
from vtp_plugin.tune.search.stage_cost import best_hop_s, fits_memory, held_by, least_together_s, tail_s

# Beginnings that differ by less than this share are taken for one.
_NEAR = 1e-4
# Precision of the time of the busiest stage; no two numbers of layers are so near to each other.
_LITTLE = 1e-6


@dataclass(frozen=True, slots=True, order=True)
class LayerSplit:
    """How many layers each stage holds, with a bound on the step.

    Attributes:
        bound_s: lower bound on the step, in seconds.
        layers: number of layers of every stage.
    """

    bound_s: float
    layers: tuple[int, ...]


class _Beginning(NamedTuple):
    """The first stages of a pipeline, and the four numbers from which the bound of the whole follows.

    Attributes:
        before_s: P of the next stage.
        still_s: the largest bound of a stage in which R does not occur.
        once_s: the largest bound in which R occurs once, without the part of R that later stages add.
        twice_s: the largest bound in which R occurs twice, without the part of R that later stages add.
        layers: number of layers of each of these stages.
    """

    before_s: float
    still_s: float
    once_s: float
    twice_s: float
    layers: tuple[int, ...]

    def least_s(self, to_come_s: float) -> float:
        return max(self.still_s, self.once_s + to_come_s, self.twice_s + 2 * to_come_s)

    def is_no_better(self, other: _Beginning, near_s: float) -> bool:
        return (
            self.before_s >= other.before_s - near_s
            and self.still_s >= other.still_s - near_s
            and self.once_s >= other.once_s - near_s
            and self.twice_s >= other.twice_s - near_s
        )


class _StageSeconds(NamedTuple):
    """The seconds of a stage.

    Attributes:
        forward: of its forward.
        backward: of its whole backward.
        later: of the part of that which may be left for later.
        hop: of the link behind it, there and back.
        ahead: what the stage and its link add to P.
        tail: of what follows its last backward.
    """

    forward: float
    backward: float
    later: float
    hop: float
    ahead: float
    tail: float


_START = _Beginning(0.0, 0.0, -math.inf, -math.inf, ())


def split_layers(
    space: SearchSpace, stage_types: Sequence[StageType], below_s: float, *, most_alike: int = 1
) -> list[LayerSplit]:
    """Split the layers so that the bound on the step is least, and in other ways that may be as good.

    Args:
        space: the search space.
        stage_types: the type of every stage, in order.
        below_s: only steps that may be shorter than so many seconds count.
        most_alike: a beginning is dropped where so many others are no worse.

    Returns:
        The splits with the least bound first; none if no step can be shorter, or the memory is too small.
    """
    num_microbatches = space.split.num_microbatches
    more_s = _together_s(space, stage_types)
    most_s = below_s / num_microbatches
    if space.problem.objective == "cards":
        most_s = _quickest_s(space, stage_types, more_s)
        if most_s == math.inf:
            return []
        # No step is longer where links take no time.
        below_s = min(below_s, (num_microbatches + len(stage_types)) * most_s)
    every = (
        _Stages(space, stage_types, more_s, most_s, number) for number in _layer_counts(space.problem, stage_types)
    )
    return sorted(layer_split for stages in every for layer_split in _least(stages, below_s, most_alike))


class _Stages:
    """The stages in order, and the limits of what each may hold.

    Args:
        space: the search space.
        stage_types: the type of every stage.
        more_s: seconds of each stage's collectives at its boundaries at least, forward and backward.
        most_s: seconds that no stage may reach for a microbatch.
        number: number of layers of every stage between the first and the last; None for any. If all stages hold equally
            many, that of the first and the last, too.
    """

    def __init__(
        self,
        space: SearchSpace,
        stage_types: Sequence[StageType],
        more_s: Sequence[tuple[float, float]],
        most_s: float,
        number: int | None,
    ) -> None:
        self.space, self.stage_types, self.more_s, self.most_s, self.number = (
            space,
            stage_types,
            more_s,
            most_s,
            number,
        )
        # Looked up once: each is asked for many times.
        self.speeds = [space.speeds[stage_type] for stage_type in stage_types]
        self.limits = [space.memory_bytes(stage_type) for stage_type in stage_types]

    def ends(self, stage: int, start: int) -> Iterator[tuple[int, tuple[float, float, float]]]:
        """Yield where a stage that begins at a layer can end, with its seconds then.

        They are those of the forward, of the backward, and of the part of it that may be left for later.
        """
        problem, speed, more = self.space.problem, self.speeds[stage], self.more_s[stage]
        num_after = len(self.stage_types) - stage - 1
        last = problem.num_layers - num_after
        ends = range(start + 1, last + 1) if num_after else range(last, last + 1)
        if self.number is not None and num_after and (stage or problem.layers == "equal"):
            ends = range(start + self.number, min(start + self.number, last) + 1)
        for end in ends:
            forward, backward = speed.times_s(start, end, is_first=not stage, is_last=not num_after)
            later = 0.0
            if problem.split_backward:
                later = min(speed.weights_sums[end] - speed.weights_sums[start], backward)
            forward, backward = forward + more[0], backward + more[1]
            if forward + backward >= self.most_s or not self._layers_fit_memory(stage, (start, end)):
                return
            yield end, (forward, backward, later)

    def _layers_fit_memory(self, stage: int, layers: tuple[int, int]) -> bool:
        """Whether a stage's cards can hold its layers."""
        limit, num_stages = self.limits[stage], len(self.stage_types)
        if limit is None:
            return True
        ends = {"is_first": stage == 0, "is_last": stage == num_stages - 1}
        held = held_by(self.space.split, self.stage_types[stage], layers, num_stages - stage, **ends)
        return fits_memory(held, limit)


def _layer_counts(problem: SearchProblem, stage_types: Sequence[StageType]) -> Sequence[int | None]:
    """List how many layers each stage between the first and the last may hold; None stands for any numbers."""
    num_between = len(stage_types) - 2
    if problem.layers == "equal":
        number, left = divmod(problem.num_layers, len(stage_types))
        return () if left else (number,)
    if problem.layers == "any" or num_between < 2:
        return (None,)
    return range(1, (problem.num_layers - 2) // num_between + 1)


def _together_s(space: SearchSpace, stage_types: Sequence[StageType]) -> list[tuple[float, float]]:
    """Bound from below the collectives of every stage at its boundaries, forward and backward."""
    boundary_s = [(0.0, 0.0)] * len(stage_types)
    speeds = (space.speeds[stage_type] for stage_type in stage_types)
    if any(speed.gather_s or speed.broadcast_s for speed in speeds):
        for stage, pair in enumerate(pairwise(stage_types)):
            row = least_together_s(space, *pair)
            for end, more in ((stage, row[:2]), (stage + 1, row[2:])):
                boundary_s[end] = (boundary_s[end][0] + more[0], boundary_s[end][1] + more[1])
    return boundary_s


def _quickest_s(space: SearchSpace, stage_types: Sequence[StageType], more_s: Sequence[tuple[float, float]]) -> float:
    """Give the least time of the busiest stage, rounded up a little; inf if nothing fits."""
    num_layers, speeds = space.problem.num_layers, [space.speeds[stage_type] for stage_type in stage_types]

    def fits(most_s: float) -> bool:
        for number in _layer_counts(space.problem, stage_types):
            stages, starts = _Stages(space, stage_types, more_s, most_s, number), {0}
            for stage in range(len(stage_types)):
                starts = {end for start in starts for end, _ in stages.ends(stage, start)}
            if starts:
                return True
        return False

    # As if layers could be cut; with a layer more for each stage there is room for all, if it is only time that counts.
    rate = sum(1 / speed.least_s for speed in speeds)
    least, most = num_layers / rate, 2 * (num_layers + len(stage_types)) / rate
    if not fits(most):
        least, most = most, 2 * sum(sum(speed.times_s(0, num_layers, is_first=True, is_last=True)) for speed in speeds)
        if not fits(most):
            return math.inf
    while most - least > _LITTLE * most:
        middle = (least + most) / 2
        least, most = (least, middle) if fits(middle) else (middle, most)
    return most


def _least(stages: _Stages, below_s: float, most_alike: int) -> list[LayerSplit]:
    space, stage_types, speeds = stages.space, stages.stage_types, stages.speeds
    num_stages, num_layers, num_microbatches = len(stage_types), space.problem.num_layers, space.split.num_microbatches
    is_split = space.problem.split_backward
    # Where the first layers train nothing a gradient may not come back.
    ways = 1 if space.problem.num_frozen else 2
    hops_s = [*(ways * best_hop_s(space, *pair) for pair in pairwise(stage_types)), 0.0]
    # What is still to come after each stage, at best.
    rates, hops_left, least = [0.0], [0.0], [math.inf]
    for speed, hop in zip(reversed(speeds[1:]), reversed(hops_s[1:]), strict=True):
        rates.append(rates[-1] + 1 / speed.least_s)
        hops_left.append(hops_left[-1] + hop)
        least.append(min(least[-1], speed.least_passing_s if is_split else speed.least_s))
    rates, hops_left, least = rates[::-1], hops_left[::-1], least[::-1]
    near_s = _NEAR * below_s if most_alike == 1 and below_s < math.inf else 0.0
    begins: dict[int, list[_Beginning]] = {0: [_START]}
    for stage, stage_type in enumerate(stage_types):
        grown: dict[int, list[_Beginning]] = {}
        in_flight = num_stages if is_split else num_stages - stage
        in_flight = num_microbatches if space.problem.runs_ahead else min(in_flight, num_microbatches)
        for start, row in begins.items():
            first_s = min(begin.before_s for begin in row)
            for end, times in stages.ends(stage, start):
                left = num_layers - end
                to_come_s = hops_left[stage] + (left * least[stage] if left else 0.0)
                rest_s = num_microbatches * left / rates[stage] if left else 0.0
                ending_s = 0.0 if stage or end <= space.problem.num_frozen else tail_s(space, stage_type, end)
                ahead_s = times[0] + hops_s[stage] / 2 if is_split else times[0] + times[1] + hops_s[stage] + ending_s
                if first_s + ahead_s + rest_s >= below_s:
                    continue
                stage_s = _StageSeconds(*times, hops_s[stage], ahead_s, ending_s)
                for begin in row:
                    new = _add(begin, stage_s, in_flight, num_microbatches, end - start)
                    if new.before_s + rest_s < below_s and new.least_s(to_come_s) < below_s:
                        _keep(grown.setdefault(end, []), new, near_s, most_alike)
        begins = grown
    return sorted(LayerSplit(begin.least_s(0.0), begin.layers) for begin in begins.get(num_layers, ()))


def _add(
    begin: _Beginning,
    stage_s: _StageSeconds,
    in_flight: int,
    num_microbatches: int,
    num_layers: int,
) -> _Beginning:
    """Extend a beginning by a stage and the link behind it.

    Args:
        begin: the beginning.
        stage_s: seconds of the stage.
        in_flight: w of the stage.
        num_microbatches: m.
        num_layers: number of layers of the stage.
    """
    # Without function calls: this is asked millions of times.
    forward, backward, later, hop_s, ahead_s, tail_s = stage_s
    own = begin.before_s + tail_s + num_microbatches * (forward + backward)
    both = forward + backward - later
    least, most = (in_flight - 1) * forward, (in_flight - 1) * backward
    if most < least:
        least, most = most, least
    still_s = begin.still_s
    once_s, other = begin.once_s + both, own - least
    twice_s = begin.twice_s + 2 * both
    if num_microbatches > in_flight:
        # With all microbatches in flight at once the two times of idling may be one.
        twice_s = max(twice_s, other - most)
    return _Beginning(
        begin.before_s + ahead_s,
        own if own > still_s else still_s,
        (other if other > once_s else once_s) + hop_s,
        twice_s + 2 * hop_s,
        (*begin.layers, num_layers),
    )


def _keep(row: list[_Beginning], new: _Beginning, near_s: float, most_alike: int) -> None:
    """Add a beginning to those with equally many layers, unless ``most_alike`` are as good; drop what it beats."""
    as_good = 0
    for old in row:
        as_good += new.is_no_better(old, near_s)
        if as_good == most_alike:
            return
    if most_alike == 1:
        row[:] = [old for old in row if not old.is_no_better(new, near_s)]
    row.append(new)
