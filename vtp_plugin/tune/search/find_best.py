"""Searches for the best layouts, and for the best ones that stock Megatron can run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from vtp_plugin.tune.search.enumerate_lists import StageCounts, enumerate_lists
from vtp_plugin.tune.search.evaluate import Candidate, evaluate, least_split_s, with_split
from vtp_plugin.tune.search.fixed_edge import beside_edges, interleaved_lists
from vtp_plugin.tune.search.layer_split import LayerSplit, split_layers
from vtp_plugin.tune.search.problem import SearchProblem, SearchSpace, StageType
from vtp_plugin.tune.search.schedule_time import forget_compiled, in_megatron, orders

# A layout that cannot beat the best one by this share is not looked at.
_SHARE = 0.002
# When layers are split once more, so many beginnings that hold equally many layers are kept.
_MOST_ALIKE = 8
# Shares of the time limit for stock Megatron, with equally many layers and with any layers; the rest is for all lists.
_EQUAL_SHARE, _STOCK_SHARE = 0.1, 0.3


class _Unfinished(NamedTuple):
    """An order of stages that may be quicker with other layers.

    Attributes:
        bound_s: lower bound on the step, for any layers.
        space: the search space that the order belongs to.
        order: the stage types in order.
        known: splits of the layers that were looked at.
    """

    bound_s: float
    space: SearchSpace
    order: tuple[StageType, ...]
    known: frozenset[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        best: the best layouts, the best one first; with the objective ``cards`` that of every split for which one fits.
        stock: the best layout that stock Megatron can run: one tensor-parallel size, any layers that its flags can
            express. None if there is none, or with the objective ``cards``.
        equal: the best layout that stock Megatron can run with equally many layers on every stage.
        unlimited: the best layout that stock Megatron can run without the limits of the search; None if it has none.
        is_complete: whether every list was simulated or shown to be no better; else the time was over, or Ctrl-C came.
        num_simulated: number of layouts that were simulated.
    """

    best: tuple[Candidate, ...]
    stock: Candidate | None
    equal: Candidate | None
    is_complete: bool
    num_simulated: int
    unlimited: Candidate | None = None


Tell = Callable[[float, float], None]
"""Called with how much is done, from 0 to 1, and the shortest step so far in seconds."""


def find_best(
    problem: SearchProblem,
    *,
    unlimited: SearchProblem | None = None,
    num_best: int = 5,
    limit_s: float = math.inf,
    tell: Tell | None = None,
) -> SearchResult:
    """Find the best layouts; the result depends on the problem alone, unless the time is over.

    Args:
        problem: the search problem.
        unlimited: the same without its limits, in which stock Megatron's best layout is looked for as well.
        num_best: how many layouts to return at most.
        limit_s: processor seconds after which the best layouts so far are returned, as after a KeyboardInterrupt; not
            with the objective ``cards``.
        tell: called with the progress.
    """
    try:
        if problem.objective == "cards":
            return _with_most_cards(problem)
        return _fastest(problem, unlimited, num_best, limit_s, tell)
    finally:
        forget_compiled()


def _with_most_cards(problem: SearchProblem) -> SearchResult:
    """Find the best layout of every split, and sort them by their steps."""
    searches = [_Search(replace(problem, splits=(split,)), 1, math.inf, None) for split in problem.splits]
    for search in searches:
        search.try_fullest()
    # Rounded: simulated times are sums in different orders.
    best = sorted(
        (candidate for search in searches for candidate in search.best),
        key=lambda candidate: (round(candidate.step_s, 6), -candidate.num_cards, candidate.num_replicas),
    )
    num_simulated = sum(search.num_simulated for search in searches)
    return SearchResult(best=tuple(best), stock=None, equal=None, is_complete=True, num_simulated=num_simulated)


def _fastest(
    problem: SearchProblem, unlimited: SearchProblem | None, num_best: int, limit_s: float, tell: Tell | None
) -> SearchResult:
    """Find the layouts with the shortest steps, those of stock Megatron first."""
    start_s, done = time.process_time(), 0.0
    searches: list[_Search] = []
    for phase_problem, number, share in _phases(problem, num_best, 1.0 if unlimited is None else 1.0 - _STOCK_SHARE):
        say = None if tell is None else partial(_say_part, tell, done, share)
        search = _Search(phase_problem, number, start_s + limit_s * (done + share), say)
        for known in searches:
            search.keep(*known.best)
        # After a KeyboardInterrupt what is known already is the answer.
        if not any(each.is_interrupted for each in searches):
            search.try_quickest()
        searches.append(search)
        done += share
    of_stock = [search for search in searches if search.problem.is_stock]
    equal, stock = (next(iter(search.best), None) for search in of_stock) if of_stock else (None, None)
    best, wider = searches[-1].best, None
    if of_stock and unlimited is not None:
        whole = replace(unlimited, split_backward=False)
        searches.append(_Search(in_megatron(whole, unlimited.layers), 1, start_s + limit_s, None))
        searches[-1].keep(*of_stock[-1].best)
        if not any(each.is_interrupted for each in searches):
            searches[-1].try_quickest()
        wider = next(iter(searches[-1].best), None)
    return SearchResult(
        best=tuple(best),
        stock=stock,
        equal=equal,
        unlimited=wider,
        is_complete=all(search.is_complete for search in searches),
        num_simulated=sum(search.num_simulated for search in searches),
    )


def _phases(problem: SearchProblem, num_best: int, left: float) -> Iterator[tuple[SearchProblem, int, float]]:
    """Yield the problems to solve one after another, each with how many layouts to return and its share of the time.

    All shares together are ``left``.

    Those of stock Megatron come first, and whole backwards before split ones, which take longer to plan: each result
    prunes the next search early.
    """
    whole = replace(problem, split_backward=False)
    if problem.edge_layers is None:
        yield in_megatron(whole, "equal"), 1, _EQUAL_SHARE
        yield in_megatron(whole, problem.layers), 1, _STOCK_SHARE
        left -= _EQUAL_SHARE + _STOCK_SHARE
    if problem.split_backward:
        left /= 2
        yield whole, num_best, left
    yield problem, num_best, left


def _say_part(tell: Tell, done: float, share: float, part: float, best_s: float) -> None:
    tell(done + share * part, best_s)


class _Search:
    """One search, with the best layouts so far.

    Args:
        problem: the search problem.
        num_best: how many layouts to keep.
        until_s: processor time, in seconds, at which the search ends.
        tell: called with the progress.
    """

    def __init__(self, problem: SearchProblem, num_best: int, until_s: float, tell: Tell | None) -> None:
        self.problem = problem
        self.num_best = num_best
        self.until_s = until_s
        self.tell = tell
        self.best: list[Candidate] = []
        self.is_complete = True
        self.is_interrupted = False
        self.num_simulated = 0
        self.spaces: list[SearchSpace] = []
        for split in problem.splits:
            space = SearchSpace.of(problem, split)
            self.spaces += [space] if problem.edge_layers is None else beside_edges(space, problem.edge_layers)
        self.tried: set[tuple[int, tuple[tuple[StageType, int], ...]]] = set()
        self.unfinished: list[_Unfinished] = []

    @property
    def below_s(self) -> float:
        """Seconds that a step must be shorter than."""
        return self.best[0].step_s * (1 - _SHARE) if self.best else math.inf

    def try_quickest(self) -> None:
        """Try all lists, then what their bounds leave open."""
        try:
            if self.problem.split_backward:
                self.keep(*(with_split(self.problem, each) for each in self.best))
            # A few lists first: what is good among them bounds the others.
            for is_quick in (True, False):
                self._try_lists(is_quick=is_quick)
            self._try_again()
            self._try_interleaved()
        except (_TimeOverError, KeyboardInterrupt) as end:
            # What was found so far is an answer, too.
            self.is_complete, self.is_interrupted = False, isinstance(end, KeyboardInterrupt)

    def try_fullest(self) -> None:
        """Try the lists in the order of the objective, with the largest edge of a U first, until one fits."""
        for space in sorted(self.spaces, key=lambda space: 0 if space.edge is None else -space.edge.stage_type.tp):
            for row in enumerate_lists(space, lambda: math.inf):
                self.unfinished.clear()  # those of lists that do not fit
                self._try_list(space, row)
                if self.best:
                    self._try_again()
                    return

    def _try_lists(self, *, is_quick: bool) -> None:
        """Try the lists that may be quick enough, the shortest bound first: what is good comes early."""
        found = sorted(self._lists(is_quick=is_quick), key=lambda one: one[0])
        for index, (bound_s, space, row) in enumerate(found):
            self._say(0.0 if is_quick else index / len(found))
            if bound_s >= self.below_s:
                break
            if (space, row.counts) not in self.tried:
                self.tried.add((space, row.counts))
                self._try_list(self.spaces[space], row)

    def _lists(self, *, is_quick: bool) -> Iterator[tuple[float, int, StageCounts]]:
        """Yield a bound on the step of a list, the index of its space, and the list."""
        for index, space in enumerate(self.spaces):
            if space.least_s < self.below_s:
                for row in enumerate_lists(space, partial(self._timely_below_s, space), is_quick=is_quick):
                    yield max(space.before_s + row.bound_s, space.least_s), index, row

    def _timely_below_s(self, space: SearchSpace) -> float:
        self._check_time()
        return self._below_s(space)

    def _below_s(self, space: SearchSpace) -> float:
        return self.below_s - space.before_s

    def _try_list(self, space: SearchSpace, row: StageCounts) -> None:
        """Try a list in all orders of its stages."""
        found = []
        for order in orders(space, row):
            layer_splits = self._layer_splits(space, order)
            found += [(layer_split.bound_s, layer_split.layers, order) for layer_split in layer_splits]
            if layer_splits:
                known = frozenset(layer_split.layers for layer_split in layer_splits)
                self.unfinished.append(_Unfinished(layer_splits[0].bound_s, space, order, known))
        for bound_s, layers, order in sorted(found):
            if bound_s >= self._below_s(space):
                break
            self._simulate(space, order, layers)

    def _try_again(self) -> None:
        """Try other layers in the orders whose bound allows a shorter step."""
        for bound_s, space, order, known in sorted(self.unfinished, key=lambda layer_split: layer_split.bound_s):
            if bound_s >= self._below_s(space):
                continue
            for layer_split in self._layer_splits(space, order, most_alike=_MOST_ALIKE):
                if layer_split.bound_s >= self._below_s(space):
                    break
                if layer_split.layers not in known:
                    self._simulate(space, order, layer_split.layers)

    def _layer_splits(self, space: SearchSpace, order: Sequence[StageType], *, most_alike: int = 1) -> list[LayerSplit]:
        self._check_time()
        return split_layers(space, order, self._below_s(space), most_alike=most_alike)

    def _try_interleaved(self) -> None:
        if not self.problem.chunks or self.problem.edge_layers is not None:
            return
        found = []
        for index, space in enumerate(self.spaces):
            for interleaved in interleaved_lists(space, lambda: self.below_s):
                self._check_time()
                found.append((interleaved, index))
        for interleaved, index in sorted(found):
            if interleaved.bound_s >= self.below_s:
                break
            self._simulate(self.spaces[index], interleaved.order, interleaved.layers, num_chunks=interleaved.num_chunks)

    def _simulate(
        self, space: SearchSpace, order: Sequence[StageType], layers: Sequence[int], *, num_chunks: int = 1
    ) -> None:
        self._check_time()
        self.num_simulated += 1
        stage_types, whole_layers = space.whole_stage_types(order), space.whole_layers(layers)
        candidate = evaluate(space.whole, stage_types, whole_layers, num_chunks=num_chunks)
        if candidate is not None:
            is_split = self.problem.split_backward and least_split_s(candidate) < self.below_s
            self.keep(with_split(self.problem, candidate) if is_split else candidate)

    def keep(self, *candidates: Candidate) -> None:
        """Keep candidates; of those that have the same flags, the quickest."""
        best: dict[tuple[object, ...], Candidate] = {}
        for candidate in sorted([*self.best, *candidates], key=lambda candidate: candidate.step_s):
            best.setdefault(candidate.flagged, candidate)
        self.best = [*best.values()][: self.num_best]

    def _say(self, share: float) -> None:
        if self.tell is not None:
            self.tell(share, self.best[0].step_s if self.best else math.inf)

    def _check_time(self) -> None:
        if time.process_time() > self.until_s:
            raise _TimeOverError


class _TimeOverError(Exception):
    """The time is over."""
