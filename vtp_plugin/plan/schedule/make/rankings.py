"""In which order of urgency the edge of a U-shaped pipeline may run its legs: what the search tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from vtp_plugin.plan.schedule.cost.microbatch_route import MicrobatchRoute

# Rankings of the edge's legs, most urgent first. These 7 of the 24 possible ones include a best one in every case of a
# grid with cloud times 1, 2, 3, 2 to 8 stages and latencies 0 to 4. FE makes BS possible, so BS first is the rule that
# keeps the fewest activations of the last part.
_EDGE_RANKINGS = (
    ("BS", "FS", "FE", "BE"),
    ("BS", "FE", "FS", "BE"),
    ("BE", "BS", "FS", "FE"),
    ("BS", "BE", "FS", "FE"),
    ("BS", "BE", "FE", "FS"),
    ("BS", "FE", "BE", "FS"),
    ("BS", "FS", "BE", "FE"),
)
_EDGE_LEGS = ("FS", "FE", "BS", "BE")
# The same for two rings. Of the 720 possible ones these include a best one in each of 38 cases: 2 and 3 stages, cloud
# times 1, 2 and 3, latencies 0 to 4, 6 to 12 microbatches, encoders as long as the language model or half as long.
_TWO_RING_RANKINGS = (
    ("F1", "F2", "B2", "F3", "B1", "B3"),
    ("F2", "F3", "F1", "B3", "B2", "B1"),
    ("F1", "B3", "F3", "F2", "B1", "B2"),
    ("F2", "B3", "B2", "F3", "F1", "B1"),
    ("F2", "F1", "B1", "B3", "B2", "F3"),
    ("F3", "B3", "B1", "F1", "F2", "B2"),
)


def rankings(route: MicrobatchRoute) -> Iterator[tuple[list[tuple[int, ...]], str]]:
    """Yield a ranking of its legs for every stage, with a name; the cloud prefers backwards, or forwards.

    >>> from vtp_plugin.plan.schedule.cost.microbatch_route import make_route
    >>> from vtp_plugin.plan.schedule.cost.costs import u_costs
    >>> from vtp_plugin.plan.schedule.order.placement import u_placement
    >>> next(rankings(make_route(u_placement(2, num_rings=2), u_costs(2, num_rings=2))))
    ([(0, 2, 7, 4, 9, 5), (8, 6, 3, 1)], 'edge F1>F2>B2>F3>B1>B3, cloud B first')
    """
    edge_legs = route.legs(0)
    is_forward_only = route.stages.count(1) == len(edge_legs) - 1
    kinds, edge_rankings = _edge_rankings(len(edge_legs), is_forward_only)
    for edge, cloud in product(edge_rankings, ("",) if is_forward_only else ("B", "F")):
        cloud_rankings = [route.legs(stage)[:: -1 if cloud == "B" else 1] for stage in range(1, route.num_stages)]
        name = f"edge {'>'.join(edge)}" + (f", cloud {cloud} first" if cloud else "")
        yield [tuple(edge_legs[kinds.index(kind)] for kind in edge), *cloud_rankings], name


def _edge_rankings(num_legs: int, is_forward_only: bool) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of the edge's legs, in the order of the route, and the rankings to try."""
    num_parts = num_legs if is_forward_only else num_legs // 2
    kinds = _EDGE_LEGS if num_parts == 2 else tuple(f"F{i + 1}" for i in range(num_parts))
    if num_parts > 2:
        kinds += tuple(f"B{i}" for i in range(num_parts, 0, -1))
    if is_forward_only:
        return kinds, (kinds[num_parts - 1 :: -1], kinds[:num_parts])
    # For more rings no portfolio was looked for.
    return kinds, {2: _EDGE_RANKINGS, 3: _TWO_RING_RANKINGS}.get(num_parts, (kinds, kinds[::-1]))
