"""Bin packing of groups of ranks into nodes, each group inside one node; exact for any sizes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def pack(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    """Find a bin for every group.

    Best fit, the largest group first. If each size divides the next larger one, this packs all groups whenever that is
    possible: a larger group takes exactly the space of several smaller ones. For other sizes all packings are tried.

    Args:
        sizes: sizes of the groups, descending.
        capacities: capacity of each bin.

    Returns:
        The number of each group's bin; None if they do not all fit.

    >>> pack((4, 2, 2), (6, 2)), pack((3, 3), (4, 2)), pack((3, 2, 2, 2, 2), (6, 5))
    ((0, 0, 1), None, (1, 1, 0, 0, 0))
    """
    if sum(sizes) > sum(capacities):
        return None
    divide_each_other = all(larger % smaller == 0 for larger, smaller in pairwise(dict.fromkeys(sizes)))
    found = _best_fit(sizes, capacities)
    return found if found is not None or divide_each_other else _exhaustive(sizes, capacities)


def _best_fit(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    left, bins = list(capacities), []
    for size in sizes:
        fitting = [(free, number) for number, free in enumerate(left) if free >= size]
        if not fitting:
            return None
        _, number = min(fitting)
        left[number] -= size
        bins.append(number)
    return tuple(bins)


def _exhaustive(sizes: Sequence[int], capacities: Sequence[int]) -> tuple[int, ...] | None:
    hopeless: set[tuple[int, ...]] = set()
    left, bins = list(capacities), []

    def fill_from(group: int) -> bool:
        # Which bin is which does not matter for what still fits.
        state = (group, *sorted(left))
        if group == len(sizes):
            return True
        if state in hopeless:
            return False
        size = sizes[group]
        for free, number in sorted({free: number for number, free in reversed([*enumerate(left)])}.items()):
            if free >= size:
                left[number] -= size
                bins.append(number)
                if fill_from(group + 1):
                    return True
                bins.pop()
                left[number] += size
        hopeless.add(state)
        return False

    return tuple(bins) if fill_from(0) else None
