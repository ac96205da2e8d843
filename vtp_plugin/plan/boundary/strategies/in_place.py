"""Plans between two shardings over the same ranks: what a rank holds already does not travel."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.boundary_plan import NO_COLLECTIVE, BoundaryPlan, Transfer
from vtp_plugin.plan.boundary.endpoint import Sharding, even_cuts, num_rows, rows_of
from vtp_plugin.util.index_boxes import Box, intersect


def plan_in_place(src: Sharding, dst: Sharding) -> BoundaryPlan:
    """Let each rank take what it wants: from itself where it can, else an even part from each rank that holds it.

    A transfer from a rank to itself stays in its memory. No collective completes the plan: whoever wants a copy
    gets it whole.

    Raises:
        PlanError: The shapes differ, or the source is a sum.

    >>> from vtp_plugin.plan.boundary.endpoint import replicated, sharded
    >>> print(plan_in_place(sharded((4,), (0, 1), dim=0), replicated((4,), (0, 1))).describe())
    0 -> 0 [0:2]
    1 -> 0 [2:4]
    0 -> 1 [0:2]
    1 -> 1 [2:4]
    """
    if src.shape != dst.shape or src.summands:
        raise PlanError(f"the shape is {src.shape} upstream and {dst.shape} downstream, the summands {src.summands}")
    transfers: list[Transfer] = []
    for wanting in dst.holdings:
        for group in src.copies:
            boxes = src.boxes_of(group[0])
            if wanting.rank in group:
                pieces = {wanting.rank: boxes}
            else:
                cuts = even_cuts(num_rows(boxes), len(group))
                pieces = {rank: rows_of(boxes, *cut) for rank, cut in zip(group, cuts, strict=True)}
            for rank, held in pieces.items():
                if common := _common(held, wanting.boxes):
                    transfers.append(Transfer(src=rank, dst=wanting.rank, boxes=common))
    return BoundaryPlan(
        src=src,
        dst=dst,
        start=NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=NO_COLLECTIVE,
        strategy="in place",
    )


def plans_of_gradient(src: Sharding, dst: Sharding, summands: Sequence[Sequence[int]]) -> tuple[BoundaryPlan, ...]:
    """Plan the adjoint of :func:`plan_in_place`: the sum of what these plans deliver, added in their order.

    Args:
        src: Sharding before the forward plan.
        dst: Sharding after it, and that of the gradient.
        summands: Groups of ranks whose gradients add up; the `i`-th plan moves those of each group's `i`-th rank.
    """
    shardings = [_only(dst, ranks) for ranks in zip(*summands, strict=True)] if summands else [dst]
    return tuple(plan_in_place(one, src) for one in shardings)


def _only(sharding: Sharding, ranks: Sequence[int]) -> Sharding:
    """Return what some ranks hold, which is the whole tensor."""
    return Sharding(shape=sharding.shape, holdings=tuple(one for one in sharding.holdings if one.rank in ranks))


def _common(held: tuple[Box, ...], wanted: tuple[Box, ...]) -> tuple[Box, ...]:
    found = [intersect(one, other) for one in held for other in wanted]
    return tuple(sorted(box for box in found if box is not None))
