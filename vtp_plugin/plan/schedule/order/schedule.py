"""A schedule: what every worker computes, in which order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from vtp_plugin.plan.schedule.order.actions import Action, format_actions
from vtp_plugin.plan.schedule.order.placement import Placement

Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The orders of all workers for one step: compute only, or lowered, which means with all communication.

    Attributes:
        name: Short name of the kind, such as `1f1b`.
        placement: Which stage holds which virtual stage, and its replicas.
        num_microbatches: Microbatches of the step, numbered from 0; the replicas of a stage share them.
        orders: `orders[worker]` are the actions of a worker, one after the other.
        forward_only: Whether there is no backward pass (evaluation).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Actions, ...]
    forward_only: bool = False

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ when anything but the name differs; ranks compare them."""
        # The numbers of replicas are in it too, in the labels of the orders.
        follows = "" if self.placement.is_chain else f" {self.placement.successors}"
        if any(max(sizes) > 1 for sizes in self.placement.joint):
            follows += f" {self.placement.joint}"
        text = f"{self.placement.stages}{follows} {self.num_microbatches} {self.forward_only}\n{self.describe()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Write one line for each worker, such as `stage 1: 1F0 1B0` or `stage 1 replica 0: 1F0 1F2`."""
        lines = (f"{self.placement.label(worker)}: {format_actions(order)}" for worker, order in enumerate(self.orders))
        return "\n".join(lines)
