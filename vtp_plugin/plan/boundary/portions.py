"""Portions of messages, so that a stage gathers what has come while the rest is still on its way.

A plan that ends with an all-gather takes two networks one after the other: the links between the stages, then those
inside the receiving stage. Cut into portions, the second works while the first does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vtp_plugin.plan.boundary.boundary_plan import Transfer
from vtp_plugin.plan.boundary.sharding import even_cuts, num_rows, rows_of
from vtp_plugin.util.index_boxes import Box

# Smaller ones cost more than they save: between stages of 2 and 3 ranks on loopback, portions of 256 KiB made 4 MiB a
# third slower (`python -m benchmarks.boundary`); on links of 200 Mbit/s they were not faster than those of 1 MiB.
MIN_PORTION_BYTES = 1 << 20
MAX_PORTIONS = 8


@dataclass(frozen=True, slots=True)
class Swap:
    """Rows that a rank passes on to the other ranks of its stage as soon as they have come.

    Attributes:
        start: First row in the rank's local tensor.
        stop: Row behind the last.
        num_arrived: Number of the rank's messages, in their order, that must have come before.
    """

    start: int
    stop: int
    num_arrived: int


def cut_into_portions(transfers: Sequence[Transfer], bytes_of: Callable[[Transfer], int]) -> tuple[Transfer, ...]:
    """Cut messages into portions of some size, in the order in which they are sent: first portions first.

    Args:
        transfers: All sends, or all receives, of one rank; sender and receiver cut a transfer alike.
        bytes_of: Gives the size of a transfer in bytes.

    >>> whole = Transfer(src=0, dst=1, boxes=(((0, 5), (0, 1)),))
    >>> small = Transfer(src=0, dst=2, boxes=(((5, 6), (0, 1)),))
    >>> for one in cut_into_portions([whole, small], lambda one: one.num_elements * MIN_PORTION_BYTES // 2):
    ...     print(one)
    0 -> 1 [0:3, 0:1]
    0 -> 2 [5:6, 0:1]
    0 -> 1 [3:5, 0:1]
    """
    cuts = [_portions(one, bytes_of(one)) for one in transfers]
    # By the fraction of the transfer that has been sent before a portion.
    order = sorted(
        (index / len(portions), number, index) for number, portions in enumerate(cuts) for index in range(len(portions))
    )
    return tuple(cuts[number][index] for _, number, index in order)


def _portions(transfer: Transfer, num_bytes: int) -> list[Transfer]:
    rows = num_rows(transfer.boxes)
    number = max(1, min(MAX_PORTIONS, rows, num_bytes // MIN_PORTION_BYTES))
    return [replace(transfer, boxes=rows_of(transfer.boxes, *cut)) for cut in even_cuts(rows, number)]


def swaps(messages: Sequence[Transfer], row_of: Callable[[Box], int]) -> tuple[Swap, ...]:
    """List the rows that a rank can pass on after each of its messages, in the order in which they are complete.

    Args:
        messages: Transfers to the rank, in order; together they fill all its rows.
        row_of: Gives the first row of a box in the rank's local tensor.

    >>> halves = [Transfer(src=0, dst=2, boxes=(((0, 4), (0, 1)),)), Transfer(src=1, dst=2, boxes=(((0, 4), (1, 2)),))]
    >>> messages = cut_into_portions(halves, lambda one: one.num_elements * MIN_PORTION_BYTES // 2)
    >>> swaps(messages, lambda box: box[0][0])
    (Swap(start=0, stop=2, num_arrived=2), Swap(start=2, stop=4, num_arrived=4))
    """
    filled = [
        (start, start + box[0][1] - box[0][0], number)
        for number, message in enumerate(messages, 1)
        for box in message.boxes
        for start in (row_of(box),)
    ]
    bounds = sorted({bound for start, stop, _ in filled for bound in (start, stop)})
    found = [
        Swap(start, stop, max((number for first, last, number in filled if first <= start and stop <= last), default=0))
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    return tuple(sorted((one for one in found if one.num_arrived), key=lambda one: (one.num_arrived, one.start)))
