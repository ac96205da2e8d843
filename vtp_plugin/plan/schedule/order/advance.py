"""The loop behind every walk over orders: let workers proceed until none can.

Lowering, checking, simulating and replaying orders have this in common: each worker takes the entries of its list one
after another, and stops at an entry that needs something from another worker. What can be taken now can also be taken
later. So the result does not depend on which worker goes first, and a worker that is stuck at the end stays stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


def advance(num_workers: int, go: Callable[[int], Iterable[int]]) -> None:
    """Let workers proceed until none can.

    Args:
        num_workers: workers are numbered from 0.
        go: lets one worker go as far as it can, and returns the workers that it may have freed: none if it did not
            move; too many do no harm. It is called at least once for each worker, and again when another one names it.
    """
    waiting = deque(range(num_workers))
    is_waiting = [True] * num_workers
    while waiting:
        worker = waiting.popleft()
        is_waiting[worker] = False
        for other in go(worker):
            if other != worker and not is_waiting[other]:
                is_waiting[other] = True
                waiting.append(other)


def advance_orders(orders: Sequence[Sequence[Entry]], take: Callable[[int, Entry], bool]) -> list[int]:
    """Let every worker take the entries of its order, and return how many each has taken.

    Args:
        orders: order of every worker.
        take: takes one entry of a worker; False if the worker has to wait for another one.

    >>> done = set()
    >>> def take(worker, entry):
    ...     return entry - 1 in done | {0} and not done.add(entry)
    >>> advance_orders([[2, 3], [1, 5]], take)
    [2, 1]
    """
    reached = [0] * len(orders)
    everybody = range(len(orders))

    def go(worker: int) -> Iterable[int]:
        order, start = orders[worker], reached[worker]
        while reached[worker] < len(order) and take(worker, order[reached[worker]]):
            reached[worker] += 1
        return everybody if reached[worker] > start else ()

    advance(len(orders), go)
    return reached
