"""What ``benchmarks/unequal_dp.py`` simulates, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from vtp_plugin.plan.schedule.cost.costs import Costs, uniform_costs
from vtp_plugin.plan.schedule.order.placement import Placement, plain_placement, u_placement

PLAIN, PLAIN_SAME, U, U_LIMIT = "1f1b", "1f1b, kP", "u", "u, limit"
MULTIPLEX, SPLIT = "multiplex", "split"
PER_REPLICA = 8  # microbatches of a cloud replica


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPipeline:
    """What is simulated in both modes.

    Attributes:
        order: Name of the kind of order.
        num_stages: P, the number of stages.
        width: Replicas of a cloud stage, k.
        load: load of the cloud, in units of the edge's.
        latency: L, in t_f.
        per_replica: number of microbatches of a cloud replica.
    """

    order: str
    num_stages: int
    width: int
    load: float
    latency: float
    per_replica: int = PER_REPLICA

    @property
    def is_u_shaped(self) -> bool:
        """Whether the edge also has the last part of the model."""
        return self.order in (U, U_LIMIT)

    @property
    def placement(self) -> Placement:
        """Stages and replicas."""
        place = u_placement if self.is_u_shaped else plain_placement
        return place(self.num_stages, num_replicas=(1,) + (self.width,) * (self.num_stages - 1))

    @property
    def costs(self) -> Costs:
        """Costs of one microbatch.

        >>> SimulatedPipeline(order=U, num_stages=2, width=4, load=0.5, latency=1.0).costs.forward
        (1.0, 4.0, 1.0)
        """
        placement = self.placement
        edge, cloud = (1.0 if self.is_u_shaped else 2.0), 2.0 * self.load * self.width
        forward = tuple(edge if stage == 0 else cloud for stage in placement.stages)
        return replace(
            uniform_costs(placement),
            forward=forward,
            backward=tuple(2 * time for time in forward),
            latency=tuple(self.latency if 0 in link else 0.0 for link in pairwise(placement.stages)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One simulated step; times in t_f.

    Attributes:
        case: What was simulated.
        mode: mode in which it was simulated.
        step: time of the step.
        bound: Time that no order of the mode can beat, with any number of microbatches in flight.
        utilisation: Share of the step in which the edge computes.
        kept: Most activations that the edge keeps at a time, in those of t_f of layers for a microbatch.
        step_with_gain: Step time of split if larger microbatches save the edge a tenth of its time.
    """

    case: SimulatedPipeline
    mode: str
    step: float
    bound: float
    utilisation: float
    kept: float
    step_with_gain: float = 0.0
