"""Plans of headers: small vectors that say what the tensor behind them is."""

from __future__ import annotations

from collections.abc import Sequence

from vtp_plugin.boundary.plan import NO_COLLECTIVE, BoundaryPlan, CollectiveKind, Transfer, inside
from vtp_plugin.boundary.spread import Box, Holding, Spread


def plan_header(plan: BoundaryPlan, length: int, shares: Sequence[Sequence[int]] = ()) -> BoundaryPlan:
    """Plan how a small vector gets to every destination rank of `plan`, over links that `plan` uses.

    If leaders carry the plan, they broadcast the vector; otherwise every destination gets it from the first rank that
    sends it anything, so `plan` must send something to each. Where several replicas send, each has a vector of its own,
    and a destination gets those of all replicas that send it anything, to compare them.

    Args:
        plan: Of the tensor.
        length: Of the vector.
        shares: Ranks of every sending replica; empty for one. With several the tensor is `[shares, length]`.

    >>> from vtp_plugin.boundary.plan import plan_sliced
    >>> from vtp_plugin.boundary.spread import replicated
    >>> print(plan_header(plan_sliced(replicated((6,), (0, 1)), replicated((6,), (2, 3, 4))), 3).describe())
    0 -> 2 [0:3]
    0 -> 3 [0:3]
    1 -> 4 [0:3]
    """
    shares = shares if len(shares) > 1 else (plan.src.ranks,)
    has_rows = len(shares) > 1
    shape = (len(shares), length) if has_rows else (length,)
    rows: list[Box] = [
        ((share, share + 1), (0, length)) if has_rows else ((0, length),) for share in range(len(shares))
    ]
    share_of = {rank: share for share, ranks in enumerate(shares) for rank in ranks}
    has_leaders = plan.strategy == "rank0"
    columns = plan.dst.columns if has_leaders else [(rank,) for rank in plan.dst.ranks]
    transfers: list[Transfer] = []
    boxes: dict[int, tuple[Box, ...]] = {}
    for leader, *others in columns:
        # Of every share the first that sends anything.
        sources = {share_of[transfer.src]: transfer.src for transfer in reversed(plan.receives_of(leader))}
        transfers += [Transfer(src=sources[share], dst=leader, boxes=(rows[share],)) for share in sorted(sources)]
        boxes |= dict.fromkeys((leader, *others), tuple(rows[share] for share in sorted(sources)))
    holdings = [Holding(rank=rank, boxes=(rows[share_of[rank]],)) for rank in plan.src.ranks]
    return BoundaryPlan(
        src=Spread(shape=shape, holdings=tuple(holdings)),
        dst=Spread(shape=shape, holdings=tuple(Holding(rank=rank, boxes=boxes[rank]) for rank in plan.dst.ranks)),
        start=NO_COLLECTIVE,
        transfers=tuple(transfers),
        finish=inside(CollectiveKind.BROADCAST, plan.dst) if has_leaders else NO_COLLECTIVE,
        strategy="header",
    )
