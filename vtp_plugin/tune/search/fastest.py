"""The best layouts, and beside them the best ones that stock Megatron can run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vtp_plugin.tune.search.enumerate_lists import SearchRound, StageCounts, rows
from vtp_plugin.tune.search.evaluate import Candidate, evaluate
from vtp_plugin.tune.search.interleave import interleaved_lists
from vtp_plugin.tune.search.layer_split import Split, split
from vtp_plugin.tune.search.problem import SearchProblem, StageType
from vtp_plugin.tune.search.schedule_time import forget_compiled
from vtp_plugin.tune.search.search_space import SearchSpace, search_spaces
from vtp_plugin.tune.search.stage_orders import orders
from vtp_plugin.tune.search.stock import in_megatron

# A layout that is not shorter than the best one by this share is not looked at.
_SHARE = 0.002
# Different sizes in one pool, round after round: most of what is good comes early, and bounds the rest.
_ROUNDS = (
    SearchRound(1, takes_all=True),
    SearchRound(1),
    SearchRound(2),
    SearchRound(2, is_mixing=True),
    SearchRound(99, is_mixing=True),
)
# Of ways to share out layers that begin with as many of them so many are kept when they are looked at once more.
_MOST_ALIKE = 8
# Of the time, at most, for what stock Megatron can run, with equally many layers and with any; all lists have the rest.
_EQUAL_SHARE, _STOCK_SHARE = 0.1, 0.3


class _Open(NamedTuple):
    """An order that may be quicker with other layers.

    Attributes:
        bound_s: for any layers.
        frame: around it.
        order: of its stages.
        known: layers that were looked at.
    """

    bound_s: float
    frame: SearchSpace
    order: tuple[StageType, ...]
    known: frozenset[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found.

    Attributes:
        best: layouts, the best one first; none if nothing fits.
        stock: the best one that stock Megatron can run: one tensor-parallel size, any layers that its flags can say.
            None if there is none, or where cards count.
        equal: likewise, with equally many layers on every stage.
        is_complete: every list was looked at or shown to be no better; else the time was over, or Ctrl-C came.
        num_judged: layouts that were simulated.
    """

    best: tuple[Candidate, ...]
    stock: Candidate | None
    equal: Candidate | None
    is_complete: bool
    num_judged: int


Tell = Callable[[float, float], None]
"""Called with how much is done, from 0 to 1, and the shortest step so far in seconds."""


def fastest(
    question: SearchProblem, *, num_best: int = 5, limit_s: float = math.inf, tell: Tell | None = None
) -> Found:
    """Find the best layouts; a function of the question alone, if the time is not over.

    Args:
        question: what is asked.
        num_best: how many are wanted.
        limit_s: seconds of the processor, after which the best so far are returned, as after a KeyboardInterrupt; not
            where cards count.
        tell: of the progress.
    """
    start_s, done = time.process_time(), 0.0
    searches: list[_Search] = []
    try:
        for asked, number, share in _phases(question, num_best):
            say = None if tell is None else partial(_say_part, tell, done, share)
            one = _Search(asked, number, start_s + limit_s * (done + share), say)
            for known in searches:
                one.add(*known.best)
            # After a KeyboardInterrupt what is known already is the answer.
            if not any(each.is_interrupted for each in searches):
                one.run()
            searches.append(one)
            done += share
    finally:
        forget_compiled()
    *of_stock, last = searches
    equal, stock = (next(iter(one.best), None) for one in of_stock) if of_stock else (None, None)
    return Found(
        best=tuple(last.best),
        stock=stock,
        equal=equal,
        is_complete=all(one.is_complete for one in searches),
        num_judged=sum(one.num_judged for one in searches),
    )


def _phases(question: SearchProblem, num_best: int) -> Iterator[tuple[SearchProblem, int, float]]:
    """Yield what is asked one after another, how many layouts are wanted, and the share of the time that is for it.

    What stock Megatron can run comes first: it shows early what is no better.
    """
    is_in_megatron = question.objective == "step" and question.around is None
    if is_in_megatron:
        yield in_megatron(question, "equal"), 1, _EQUAL_SHARE
        yield in_megatron(question, question.layers), 1, _STOCK_SHARE
    yield question, num_best, 1.0 - (_EQUAL_SHARE + _STOCK_SHARE) * is_in_megatron


def _say_part(tell: Tell, done: float, share: float, part: float, best_s: float) -> None:
    tell(done + share * part, best_s)


class _Search:
    """State of a search: the best so far.

    Args:
        question: what is asked.
        num_best: how many are wanted.
        until_s: time of the processor at which it ends.
        tell: of the progress.
    """

    def __init__(self, question: SearchProblem, num_best: int, until_s: float, tell: Tell | None) -> None:
        self.question = question
        self.num_best = num_best
        self.until_s = until_s
        self.tell = tell
        self.best: list[Candidate] = []
        self.is_complete = True
        self.is_interrupted = False
        self.num_judged = 0
        self.frames = [*search_spaces(question)]
        self.open: list[_Open] = []

    @property
    def below_s(self) -> float:
        """What a step must be shorter than."""
        return self.best[0].step_s * (1 - _SHARE) if self.best else math.inf

    def run(self) -> None:
        """Go through the lists."""
        if self.question.objective == "cards":
            self._try_fullest()
            return
        try:
            self._try_quickest()
        except (_TimeOverError, KeyboardInterrupt) as end:
            # What was found so far is an answer, too.
            self.is_complete, self.is_interrupted = False, isinstance(end, KeyboardInterrupt)

    def _try_fullest(self) -> None:
        """Go through the lists in the order of the objective, the largest edge of a U first, up to one that fits."""
        reach = SearchRound(99, is_mixing=True)
        for frame in sorted(self.frames, key=lambda frame: 0 if frame.edge is None else -frame.edge.tp):
            for row in rows(frame.question, frame.shape, frame.works, reach, lambda: math.inf):
                self._try(frame, row)
                if self.best:
                    return

    def _try_quickest(self) -> None:
        """Go through all lists, round after round."""
        seen: set[tuple[int, StageCounts]] = set()
        for number, reach in enumerate(_ROUNDS):
            found = [*self._rows(reach, seen)]
            seen.update(found)
            # The shortest bound first: what is good comes early, and shows that the others are no better.
            for index, (frame, row) in enumerate(sorted(found, key=lambda one: self._bound_s(*one))):
                self._say((number + index / len(found)) / len(_ROUNDS))
                if self._bound_s(frame, row) >= self.below_s:
                    break
                self._try(self.frames[frame], row)
        self._try_again()
        self._try_interleaved()

    def _bound_s(self, index: int, row: StageCounts) -> float:
        frame = self.frames[index]
        return max(frame.before_s + row.bound_s, frame.least_s)

    def _rows(self, reach: SearchRound, seen: set[tuple[int, StageCounts]]) -> Iterator[tuple[int, StageCounts]]:
        for index, frame in enumerate(self.frames):
            if frame.least_s >= self.below_s:
                continue
            below_s = partial(self._timely_below_s, frame)
            for row in rows(frame.question, frame.shape, frame.works, reach, below_s):
                if (index, row) not in seen:
                    yield index, row

    def _timely_below_s(self, frame: SearchSpace) -> float:
        self._check_time()
        return self._below_s(frame)

    def _below_s(self, frame: SearchSpace) -> float:
        return self.below_s - frame.before_s

    def _try(self, frame: SearchSpace, row: StageCounts) -> None:
        """Try a list in all orders."""
        found = []
        for order in orders(frame.question, frame.shape, row):
            splits = self._splits(frame, order)
            found += [(one.bound_s, one.layers, order) for one in splits]
            if splits:
                known = frozenset(one.layers for one in splits)
                self.open.append(_Open(splits[0].bound_s, frame, order, known))
        for bound_s, layers, order in sorted(found):
            if bound_s >= self._below_s(frame):
                break
            self._judge(frame, order, layers)

    def _try_again(self) -> None:
        """Try orders again whose bound leaves room for a shorter step, with other layers."""
        for bound_s, frame, order, known in sorted(self.open, key=lambda one: one.bound_s):
            if bound_s >= self._below_s(frame):
                continue
            for one in self._splits(frame, order, most_alike=_MOST_ALIKE):
                if one.bound_s >= self._below_s(frame):
                    break
                if one.layers not in known:
                    self._judge(frame, order, one.layers)

    def _splits(self, frame: SearchSpace, order: Sequence[StageType], *, most_alike: int = 1) -> list[Split]:
        self._check_time()
        works = [frame.works[kind] for kind in order]
        return split(frame.question, frame.shape, order, works, self._below_s(frame), most_alike=most_alike)

    def _try_interleaved(self) -> None:
        if not self.question.chunks or self.question.around is not None:
            return
        found = []
        for index, frame in enumerate(self.frames):
            for one in interleaved_lists(self.question, frame.shape, frame.works, lambda: self.below_s):
                self._check_time()
                found.append((one, index))
        for one, index in sorted(found):
            if one.bound_s >= self.below_s:
                break
            self._judge(self.frames[index], one.order, one.layers, num_chunks=one.num_chunks)

    def _judge(
        self, frame: SearchSpace, order: Sequence[StageType], layers: Sequence[int], *, num_chunks: int = 1
    ) -> None:
        self._check_time()
        self.num_judged += 1
        kinds = frame.kinds(order)
        own = [frame.whole_works[kind] for kind in kinds]
        choice = evaluate(self.question, frame.whole, kinds, own, frame.layers(layers), num_chunks=num_chunks)
        if choice is not None:
            self.add(choice)

    def add(self, *choices: Candidate) -> None:
        """Keep layouts; of those that a run's flags cannot tell apart the quickest."""
        best: dict[tuple[object, ...], Candidate] = {}
        for one in sorted([*self.best, *choices], key=lambda one: one.step_s):
            best.setdefault(one.flagged, one)
        self.best = [*best.values()][: self.num_best]

    def _say(self, share: float) -> None:
        if self.tell is not None:
            self.tell(share, self.best[0].step_s if self.best else math.inf)

    def _check_time(self) -> None:
        if time.process_time() > self.until_s:
            raise _TimeOverError


class _TimeOverError(Exception):
    """The time is over."""
