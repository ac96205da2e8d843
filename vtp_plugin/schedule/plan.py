"""A schedule: what every stage computes, in which order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from vtp_plugin.schedule.actions import Action, format_actions
from vtp_plugin.schedule.placement import Placement

Actions = tuple[Action, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of compute for one step, or with its communication if :func:`~vtp_plugin.schedule.lower.lower` made it.

    Attributes:
        name: Short name of the kind, such as `1f1b`.
        placement: Which stage holds which virtual stage.
        num_microbatches: Microbatches of the step, numbered from 0.
        orders: `orders[stage]` are the actions of a stage, one after the other.
        forward_only: There is no backward pass (evaluation).
    """

    name: str
    placement: Placement
    num_microbatches: int
    orders: tuple[Actions, ...]
    forward_only: bool = False

    @property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ when anything but the name differs; ranks compare them."""
        text = f"{self.placement.stages} {self.num_microbatches} {self.forward_only}\n{self.describe()}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> str:
        """Write one line for each stage, such as `stage 1: 1F0 1B0`."""
        return "\n".join(f"stage {stage}: {format_actions(order)}" for stage, order in enumerate(self.orders))
