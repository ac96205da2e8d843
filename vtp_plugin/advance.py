"""The loop behind every walk over orders: workers go on until none can.

Whoever lowers, checks, simulates or replays orders does the same: each worker has a list, takes its entries one after
the other, and stops at an entry that needs something of another worker. What is possible stays possible, so it does not
matter which worker is asked first, and who stands in the end stands for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Entry = TypeVar("Entry")


def advance(num_workers: int, go: Callable[[int], Iterable[int]]) -> None:
    """Let workers go on until none can.

    Args:
        num_workers: workers are numbered from 0.
        go: lets one worker go as far as it can, and returns the workers that may go on because of it: none if it did
            not move, too many do no harm. A worker is asked once at least, then whenever another one names it.
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
    """Let every worker take the entries of its order, and return how far each came.

    Args:
        orders: of the workers.
        take: takes one entry of a worker; False where it has to wait for another worker.

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
