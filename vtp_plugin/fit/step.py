"""How long a step takes, as the project's simulator says it, where only computing takes time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vtp_plugin.schedule.cost.costs import Costs
from vtp_plugin.schedule.order.placement import Placement, plain_placement, u_placement
from vtp_plugin.search.order import pipeline_time


def step_costs(sizes: Sequence[int], layers: Sequence[int]) -> tuple[Placement, Costs]:
    """Give the placement of a pipeline, and the durations of its parts: a layer takes one card 1, and 2 back.

    Args:
        sizes: tensor-parallel size of every stage.
        layers: of every stage; in a U one part more, the edge's last.

    >>> placement, costs = step_costs((1, 2), (1, 4, 1))
    >>> placement.stages, costs.forward
    ((0, 1, 0), (1.0, 2.0, 1.0))
    """
    is_u_shaped = len(layers) > len(sizes)
    placement = u_placement(len(sizes)) if is_u_shaped else plain_placement(len(sizes))
    forward = tuple(number / sizes[stage] for number, stage in zip(layers, placement.stages, strict=True))
    num_links = placement.num_vstages - 1
    return placement, Costs(
        forward=forward,
        backward=tuple(2 * duration for duration in forward),
        latency=(0.0,) * num_links,
        bandwidth=(math.inf,) * num_links,
        message_bytes=(0,) * num_links,
    )


def step_time(sizes: Sequence[int], layers: Sequence[int], num_microbatches: int) -> float:
    """Simulate a step.

    Args:
        sizes: tensor-parallel size of every stage.
        layers: of every stage; in a U one part more.
        num_microbatches: of a replica.

    >>> step_time((2, 1), (2, 1), 4), step_time((2, 1), (2, 1), 1000)
    (15.0, 3003.0)
    """
    placement, costs = step_costs(sizes, layers)
    return pipeline_time(placement, costs, num_microbatches)[0]
