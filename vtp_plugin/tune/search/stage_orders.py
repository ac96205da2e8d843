"""Orders in which the stages of a list may follow each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, permutations

from vtp_plugin.tune.search.enumerate_lists import StageCounts
from vtp_plugin.tune.search.node_assignment import along_nodes
from vtp_plugin.tune.search.problem import StageType
from vtp_plugin.tune.search.search_space import SearchSpace

# Up to so many orders of a list are all tried; of more, only those in which stages of one type are neighbours.
_MOST_ORDERS = 60


def orders(space: SearchSpace, row: StageCounts) -> Iterator[tuple[StageType, ...]]:
    """Yield orders of a list's stages, those of a site together; with the objective ``cards``, that of the nodes."""
    if space.problem.objective == "cards":
        yield along_nodes(space.split, [stage_type for stage_type, count in row.counts for _ in range(count)])
        return

    def site_of(one: tuple[StageType, int]) -> str:
        return space.site(one[0])

    by_site = {site: [*group] for site, group in groupby(sorted(row.counts, key=site_of), key=site_of)}
    num_orders = math.prod(
        math.factorial(sum(count for _, count in group)) // math.prod(math.factorial(count) for _, count in group)
        for group in by_site.values()
    )
    for sites in permutations(by_site):
        yield from _joined([by_site[site] for site in sites], is_any=num_orders <= _MOST_ORDERS)


def _joined(groups: Sequence[list[tuple[StageType, int]]], *, is_any: bool) -> Iterator[tuple[StageType, ...]]:
    if not groups:
        yield ()
        return
    first_orders = _mixed(groups[0]) if is_any else _blocks(groups[0])
    for first in first_orders:
        for rest in _joined(groups[1:], is_any=is_any):
            yield (*first, *rest)


def _blocks(group: Sequence[tuple[StageType, int]]) -> Iterator[tuple[StageType, ...]]:
    for order in permutations(group):
        yield tuple(stage_type for stage_type, count in order for _ in range(count))


def _mixed(group: Sequence[tuple[StageType, int]]) -> Iterator[tuple[StageType, ...]]:
    if not group:
        yield ()
        return
    for index, (stage_type, count) in enumerate(group):
        left = [(stage_type, count - 1)] if count > 1 else []
        for rest in _mixed([*group[:index], *left, *group[index + 1 :]]):
            yield (stage_type, *rest)
