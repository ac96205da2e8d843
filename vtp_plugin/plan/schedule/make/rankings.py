"""In which order of urgency the edge of a U-shaped pipeline may run its legs: what the search tries."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

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
    # The edge ends the model and begins to go back; of a route without backwards that is where it ends.
    turn = next((q for q, pair in enumerate(pairwise(route.stages)) if pair == (0, 0)), route.num_legs - 1)
    num_forward = sum(q <= turn for q in edge_legs)
    is_forward_only = num_forward == len(edge_legs)
    kinds, edge_rankings = _edge_rankings(num_forward, len(edge_legs) - num_forward)
    for edge, cloud in product(edge_rankings, ("",) if is_forward_only else ("B", "F")):
        cloud_rankings = [route.legs(stage)[:: -1 if cloud == "B" else 1] for stage in range(1, route.num_stages)]
        name = f"edge {'>'.join(edge)}" + (f", cloud {cloud} first" if cloud else "")
        yield [tuple(edge_legs[kinds.index(kind)] for kind in edge), *cloud_rankings], name


def _edge_rankings(num_forward: int, num_backward: int) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the names of the edge's legs, in the order of the route, and the rankings to try.

    Parts that train nothing have no backward; with time reversed they have no forward.
    """
    num_parts = max(num_forward, num_backward)
    forwards = tuple(f"F{i + 1}" for i in range(num_parts))[num_parts - num_forward :]
    if not num_backward:
        names = forwards if num_parts > 2 else _EDGE_LEGS[:num_parts]
        return names, (names[::-1], names)
    if num_parts == num_forward == num_backward == 2:
        return _EDGE_LEGS, _EDGE_RANKINGS
    kinds = (*forwards, *(f"B{i}" for i in range(num_parts, num_parts - num_backward, -1)))
    if num_parts != 3:  # no portfolio was looked for
        return kinds, (kinds, kinds[::-1])
    return kinds, tuple(tuple(kind for kind in ranking if kind in kinds) for ranking in _TWO_RING_RANKINGS)
