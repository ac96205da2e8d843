"""Put groups of ranks into nodes, each group inside one; exact also where sizes do not divide each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def pack(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    """Find a room for every group.

    The largest group goes first, where the least room is left. If each size divides the next larger one, this finds a
    place for all whenever there is one: a room holds as many of a size whatever larger ones are in it instead. For
    other sizes all ways are tried.

    Args:
        sizes: of the groups, descending.
        rooms: how much each room holds.

    Returns:
        The number of each group's room; None if they do not all fit.

    >>> pack((4, 2, 2), (6, 2)), pack((3, 3), (4, 2)), pack((3, 2, 2, 2, 2), (6, 5))
    ((0, 0, 1), None, (1, 1, 0, 0, 0))
    """
    if sum(sizes) > sum(rooms):
        return None
    is_chain = all(larger % smaller == 0 for larger, smaller in pairwise(dict.fromkeys(sizes)))
    found = _tightest(sizes, rooms)
    return found if found is not None or is_chain else _any_way(sizes, rooms)


def _tightest(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    left, places = list(rooms), []
    for size in sizes:
        fitting = [(room, number) for number, room in enumerate(left) if room >= size]
        if not fitting:
            return None
        _, number = min(fitting)
        left[number] -= size
        places.append(number)
    return tuple(places)


def _any_way(sizes: Sequence[int], rooms: Sequence[int]) -> tuple[int, ...] | None:
    hopeless: set[tuple[int, ...]] = set()
    left, places = list(rooms), []

    def place(group: int) -> bool:
        # Which room is which does not matter for what still fits.
        state = (group, *sorted(left))
        if group == len(sizes):
            return True
        if state in hopeless:
            return False
        size = sizes[group]
        for room, number in sorted({room: number for number, room in reversed([*enumerate(left)])}.items()):
            if room >= size:
                left[number] -= size
                places.append(number)
                if place(group + 1):
                    return True
                places.pop()
                left[number] += size
        hopeless.add(state)
        return False

    return tuple(places) if place(0) else None
