"""Proof that a boundary plan delivers what it must, by the links that its strategy promises.

All arithmetic is on boxes, so the cost of a proof depends on the number of transfers, not on the size of the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind
from vtp_plugin.plan.boundary.endpoint import even_cuts, num_rows, rows_of
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.util.index_boxes import Box, format_box, intersect, overlaps, subtract, whole_box


def check(plan: BoundaryPlan) -> tuple[str, ...]:
    """List everything that is wrong with a plan; an empty list proves it.

    The proof: sources and destinations are ranks of their shardings; the source of each transfer holds its boxes after
    the start, which adds up the summands of the source's sharding, and nothing else; each rank of `plan.dst` gets every
    element of its boxes exactly once, finish included, and no other element; the members of the finish contribute what
    it needs (to an all-gather each its even cut of the rows, to a broadcast or scatter only the root anything); a pair
    of ranks has at most one transfer; no link carries more than the strategy's row promises (rank0: one transfer
    between two leaders; sliced and divided: each rank an even share). Each problem is one line; their order is fixed.
    Malformed ranks or boxes are reported alone, because nothing else can be computed.

    >>> from dataclasses import replace
    >>> from vtp_plugin.plan.boundary.strategies.slices import plan_sliced
    >>> from vtp_plugin.plan.boundary.endpoint import replicated
    >>> plan = plan_sliced(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
    >>> check(plan)
    ()
    >>> check(replace(plan, transfers=plan.transfers[:1]))
    ('rank 3 never gets [0:4]',)
    """
    malformed = (*_rank_problems(plan), *_box_problems(plan))
    if malformed:
        return malformed
    problems = (_source_problems, _delivery_problems, _finish_problems, _pair_problems, _promise_problems)
    return tuple(problem for find in problems for problem in find(plan))


def require_valid(plan: BoundaryPlan) -> None:
    """Stop the run if a plan has a problem.

    Raises:
        PlanError: The plan has problems; the message shows the first ones.
    """
    problems = check(plan)
    if problems:
        raise PlanError.listing(f"invalid boundary plan {plan.strategy}", problems)


def _rank_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every rank of the wrong endpoint, and every collective that a plan cannot have there."""
    src_ranks, dst_ranks = set(plan.src.ranks), set(plan.dst.ranks)
    for transfer in plan.transfers:
        if transfer.src not in src_ranks:
            yield f"transfer {transfer}: {transfer.src} is not one of the source ranks {plan.src.ranks}"
        if transfer.dst not in dst_ranks:
            yield f"transfer {transfer}: {transfer.dst} is not one of the destination ranks {plan.dst.ranks}"
    sides = (("start", plan.start, plan.src.ranks, "source"), ("finish", plan.finish, plan.dst.ranks, "destination"))
    for name, collective, ranks, side in sides:
        for rank in collective.ranks:
            if rank not in ranks:
                yield f"{name} {collective.kind}: {rank} is not one of the {side} ranks {ranks}"
    if plan.start.kind not in (CollectiveKind.NONE, CollectiveKind.GATHER, CollectiveKind.SUM):
        yield f"start {plan.start.kind}: only a gather or a sum can come before the transfers"
    if plan.finish.kind in (CollectiveKind.GATHER, CollectiveKind.SUM):
        yield f"finish {plan.finish.kind}: it completes nothing"


def _box_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every box that is not a part of the tensor."""
    if plan.src.shape != plan.dst.shape:
        yield f"the shape is {plan.src.shape} at the source and {plan.dst.shape} at the destination"
        return
    whole = whole_box(plan.src.shape)
    for transfer in plan.transfers:
        # An empty box intersects nothing, so it fails here as well.
        if any(len(box) != len(whole) or intersect(box, whole) != box for box in transfer.boxes) or not transfer.boxes:
            yield f"transfer {transfer}: a box is empty or leaves the tensor {plan.src.shape}"


def _source_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every transfer that sends what its source does not have, or a box that spans several of its boxes."""
    held = _after_start(plan)
    added = plan.start.groups if plan.start.kind is CollectiveKind.SUM else ()
    if added != plan.src.summands:
        yield f"start: the values of {added} are added up, not those of {plan.src.summands}"
    for transfer in plan.transfers:
        for box in transfer.boxes:
            for part in subtract(box, held[transfer.src]):
                yield f"transfer {transfer}: the source does not hold {format_box(part)}"
            if not any(intersect(box, one) == box for one in plan.sent_from(transfer.src).boxes):
                yield f"transfer {transfer}: {format_box(box)} is not inside one box of the source"


def _after_start(plan: BoundaryPlan) -> dict[int, Sequence[Box]]:
    """Return the boxes that each source rank has after the start."""
    held: dict[int, Sequence[Box]] = {holding.rank: holding.boxes for holding in plan.src.holdings}
    groups = plan.start.groups if plan.start.kind is CollectiveKind.GATHER else ()
    gathered = {group[0]: [box for rank in group for box in held[rank]] for group in groups}
    return {**held, **gathered}


def _delivery_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield the boxes that a destination gets twice, never, or without need."""
    delivered = _delivered(plan)
    for holding in plan.dst.holdings:
        rank, boxes = holding.rank, delivered[holding.rank]
        for i, j in overlaps(boxes):
            common = intersect(boxes[i], boxes[j])
            assert common is not None
            yield f"rank {rank} gets {format_box(common)} more than once"
        for part in _outside(holding.boxes, boxes):
            yield f"rank {rank} never gets {format_box(part)}"
        for part in _outside(boxes, holding.boxes):
            yield f"rank {rank} gets {format_box(part)}, which it does not hold"
    for transfer in plan.transfers:
        for box in transfer.boxes:
            if not any(intersect(box, one) == box for one in plan.lands_in(transfer.dst).boxes):
                yield f"transfer {transfer}: {format_box(box)} is not inside one box of the destination"


def _finish_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield members of the finish that lack what they must contribute: an even cut of the rows, or all at the root.

    The runtime gathers the cuts in place; a broadcast or scatter overwrites what any rank but the root has received.
    """
    finish = plan.finish
    for group in finish.groups:
        for index, rank in enumerate(group):
            arrived = [box for transfer in plan.receives_of(rank) for box in transfer.boxes]
            if finish.kind is CollectiveKind.ALL_GATHER:
                boxes = plan.dst.boxes_of(rank)
                start, stop = even_cuts(num_rows(boxes), len(group))[index]
                wanted = rows_of(boxes, start, stop)
                if any(_outside(wanted, arrived)) or any(_outside(arrived, wanted)):
                    yield f"finish all-gather: what {rank} receives is not rows {start}:{stop} of its memory"
            elif index > 0 and arrived:
                yield f"finish {finish.kind}: {rank} receives transfers, but {group[0]} is the root"


def _delivered(plan: BoundaryPlan) -> dict[int, list[Box]]:
    """Return all boxes that reach each destination rank, by transfers and by the finish."""
    arrived = {rank: [box for transfer in plan.receives_of(rank) for box in transfer.boxes] for rank in plan.dst.ranks}
    delivered = {rank: list(boxes) for rank, boxes in arrived.items()}
    for group in plan.finish.groups:
        root, *others = group
        for rank in group:
            match plan.finish.kind:
                case CollectiveKind.BROADCAST:
                    delivered[rank] += arrived[root] if rank in others else []
                case CollectiveKind.ALL_GATHER:
                    delivered[rank] += [box for other in group if other != rank for box in arrived[other]]
                case CollectiveKind.SCATTER:
                    parts = [intersect(box, held) for box in arrived[root] for held in plan.dst.boxes_of(rank)]
                    kept = [] if rank == root else arrived[rank]
                    delivered[rank] = kept + [part for part in parts if part is not None]
                case _:
                    raise PlanError(f"finish {plan.finish.kind}: it completes nothing")
    return delivered


def _outside(boxes: Sequence[Box], others: Sequence[Box]) -> Iterator[Box]:
    """Yield the parts of `boxes` that are outside all `others`."""
    for box in boxes:
        yield from subtract(box, others)


def _pair_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield pairs of ranks with several transfers: some backends allow one message per direction between two ranks."""
    for (src, dst), num_transfers in Counter((t.src, t.dst) for t in plan.transfers).items():
        if num_transfers > 1:
            yield f"{num_transfers} transfers {src} -> {dst}, not one"


def _promise_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield the promises of the strategy that the plan breaks."""
    if plan.strategy in STRATEGIES:
        yield from STRATEGIES[plan.strategy].promise(plan)
