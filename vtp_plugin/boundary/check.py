"""Proof that a boundary plan delivers what it must, and the bytes it costs.

All arithmetic is on boxes, so the cost depends on the number of transfers and not on the size of the tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from vtp_plugin.boundary.plan import BoundaryPlan, FinishKind, Transfer
from vtp_plugin.boundary.spread import Box, format_box, intersect, overlaps, subtract, volume, whole_box


def check(plan: BoundaryPlan) -> tuple[str, ...]:
    """List everything that is wrong with a plan; empty means it is proved.

    Proved is: sources and destinations are ranks of their spreads; each transfer's source holds its box; each rank of
    `plan.dst` gets every element of its boxes exactly once, counting the finish, and no other element; a pair of ranks
    has at most one transfer for each pair of their boxes, so at most one when both hold one box; a rank0 plan is one
    transfer between the leaders. Problems are one line each, in a fixed order. When ranks or boxes are malformed only
    that is reported, because nothing else can be worked out.

    >>> from dataclasses import replace
    >>> from vtp_plugin.boundary.plan import plan_overlap
    >>> from vtp_plugin.boundary.spread import replicated
    >>> plan = plan_overlap(replicated((4,), (0, 1)), replicated((4,), (2, 3)))
    >>> check(plan)
    ()
    >>> check(replace(plan, transfers=plan.transfers[:1]))
    ('rank 3 never gets [0:4]',)
    """
    malformed = (*_rank_problems(plan), *_box_problems(plan))
    if malformed:
        return malformed
    return (*_source_problems(plan), *_delivery_problems(plan), *_pair_problems(plan), *_rank0_problems(plan))


def require_valid(plan: BoundaryPlan) -> None:
    """Assert that a plan has no problem; the message shows all problems and the plan."""
    problems = check(plan)
    assert not problems, f"invalid boundary plan ({plan.strategy}): {'; '.join(problems)}\n{plan.describe()}"


def _name(transfer: Transfer) -> str:
    return f"transfer {transfer.src} -> {transfer.dst} {format_box(transfer.box)}"


def _rank_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every rank that stands where the spreads do not have it."""
    src_ranks, dst_ranks = set(plan.src.ranks), set(plan.dst.ranks)
    for transfer in plan.transfers:
        if transfer.src not in src_ranks:
            yield f"{_name(transfer)}: {transfer.src} is not one of the source ranks {plan.src.ranks}"
        if transfer.dst not in dst_ranks:
            yield f"{_name(transfer)}: {transfer.dst} is not one of the destination ranks {plan.dst.ranks}"
    for rank in plan.finish.ranks:
        if rank not in dst_ranks:
            yield f"finish {plan.finish.kind}: {rank} is not one of the destination ranks {plan.dst.ranks}"


def _box_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every box that is no part of the tensor."""
    if plan.src.shape != plan.dst.shape:
        yield f"the shape is {plan.src.shape} at the source and {plan.dst.shape} at the destination"
        return
    whole = whole_box(plan.src.shape)
    for transfer in plan.transfers:
        # An empty box intersects nothing, so it fails here as well.
        if len(transfer.box) != len(whole) or intersect(transfer.box, whole) != transfer.box:
            yield f"{_name(transfer)}: the box is empty or leaves the tensor {plan.src.shape}"


def _source_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every transfer that sends what its source does not have."""
    held = {holding.rank: holding.boxes for holding in plan.src.holdings}
    for transfer in plan.transfers:
        for part in subtract(transfer.box, held[transfer.src]):
            yield f"{_name(transfer)}: the source does not hold {format_box(part)}"


def _delivery_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield every element, as boxes, that a destination gets not once, or gets without holding it."""
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


def _delivered(plan: BoundaryPlan) -> dict[int, list[Box]]:
    """Return all boxes that reach each destination rank, by transfers and by the finish."""
    delivered: dict[int, list[Box]] = {rank: [] for rank in plan.dst.ranks}
    for transfer in plan.transfers:
        delivered[transfer.dst].append(transfer.box)
    if plan.finish.kind is FinishKind.BROADCAST:
        root_boxes = [transfer.box for transfer in plan.transfers if transfer.dst == plan.finish.root]
        for rank in plan.finish.ranks:
            if rank != plan.finish.root:
                delivered[rank] += root_boxes
    return delivered


def _outside(boxes: Sequence[Box], others: Sequence[Box]) -> Iterator[Box]:
    """Yield what `boxes` have and `others` do not."""
    for box in boxes:
        yield from subtract(box, others)


def _pair_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield transfers that are not one whole overlap of a source box and a destination box.

    A message that spans two boxes of a rank is not one piece of its memory; two messages for one pair of boxes are one
    too many for backends that take a single block per direction between two ranks.
    """
    src_boxes = {holding.rank: holding.boxes for holding in plan.src.holdings}
    dst_boxes = {holding.rank: holding.boxes for holding in plan.dst.holdings}
    count: Counter[tuple[int, int, Box, Box]] = Counter()
    for transfer in plan.transfers:
        src_box = _containing(transfer.box, src_boxes[transfer.src])
        dst_box = _containing(transfer.box, dst_boxes[transfer.dst])
        if src_box is None or dst_box is None:
            yield f"{_name(transfer)}: the box does not lie inside one box of each side"
        else:
            count[transfer.src, transfer.dst, src_box, dst_box] += 1
    for (src, dst, src_box, dst_box), num_transfers in count.items():
        if num_transfers > 1:
            boxes = f"from {format_box(src_box)} to {format_box(dst_box)}"
            yield f"{num_transfers} transfers {src} -> {dst} {boxes}, not one"


def _containing(box: Box, candidates: Sequence[Box]) -> Box | None:
    """Return the candidate that contains the whole of `box`, if there is one."""
    return next((candidate for candidate in candidates if intersect(box, candidate) == box), None)


def _rank0_problems(plan: BoundaryPlan) -> Iterator[str]:
    """Yield a rank0 plan's transfers when they are not one between the leaders: its promise is a single link."""
    leaders = [(plan.src.ranks[0], plan.dst.ranks[0])]
    links = [(transfer.src, transfer.dst) for transfer in plan.transfers]
    if plan.strategy == "rank0" and links != leaders:
        yield f"strategy rank0 has transfers on the links {links}, not on {leaders}"


def link_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[tuple[int, int], int]:
    """Count the bytes that each link carries, from (src, dst) to bytes, in plan order; the finish is not counted.

    >>> from vtp_plugin.boundary.plan import plan_rank0
    >>> from vtp_plugin.boundary.spread import replicated
    >>> link_bytes(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))), itemsize_bytes=2)
    {(0, 1): 16}
    """
    total_bytes: dict[tuple[int, int], int] = {}
    for transfer in plan.transfers:
        link = transfer.src, transfer.dst
        total_bytes[link] = total_bytes.get(link, 0) + volume(transfer.box) * itemsize_bytes
    return total_bytes


def egress_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[int, int]:
    """Count the bytes that each source rank sends; a rank that sends nothing has 0.

    >>> from vtp_plugin.boundary.plan import plan_rank0
    >>> from vtp_plugin.boundary.spread import replicated
    >>> egress_bytes(plan_rank0(replicated((4, 2), (0, 1)), replicated((4, 2), (2,))), itemsize_bytes=2)
    {0: 16, 1: 0}
    """
    total_bytes = dict.fromkeys(plan.src.ranks, 0)
    for (src, _), num_bytes in link_bytes(plan, itemsize_bytes).items():
        total_bytes[src] += num_bytes
    return total_bytes


def ingress_bytes(plan: BoundaryPlan, itemsize_bytes: int) -> dict[int, int]:
    """Count the bytes that each destination rank receives over the boundary; a rank that receives nothing has 0.

    >>> from vtp_plugin.boundary.plan import plan_rank0
    >>> from vtp_plugin.boundary.spread import replicated
    >>> ingress_bytes(plan_rank0(replicated((4, 2), (0,)), replicated((4, 2), (1, 2))), itemsize_bytes=2)
    {1: 16, 2: 0}
    """
    total_bytes = dict.fromkeys(plan.dst.ranks, 0)
    for (_, dst), num_bytes in link_bytes(plan, itemsize_bytes).items():
        total_bytes[dst] += num_bytes
    return total_bytes
