"""Which order a step with split backwards runs: the fastest of some, and one without a split where none is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.cost.costs import Costs
from vtp_plugin.plan.schedule.cost.step_bounds import ROUNDING
from vtp_plugin.plan.schedule.make.fill_waits import fill_waits, time_of_whole
from vtp_plugin.plan.schedule.order.schedule import Schedule

_PATIENCES = (0.0, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOrder:
    """The chosen order.

    Attributes:
        schedule: Order of compute; without a split where that is as fast.
        makespan: Its simulated time, or a little more, in the unit of the costs.
        whole_makespan: Time of the fastest order without a split.
    """

    schedule: Schedule
    makespan: float
    whole_makespan: float

    @property
    def is_split(self) -> bool:
        """Whether a split gains anything."""
        return self.makespan < self.whole_makespan

    @property
    def reason(self) -> str:
        """Say in a few words what the split gains.

        >>> from vtp_plugin.plan.schedule.cost.costs import uniform_costs
        >>> from vtp_plugin.plan.schedule.make.generate import one_f_one_b
        >>> order = one_f_one_b(4, 8)
        >>> choose_split((order,), uniform_costs(order.placement), (4,) * 4).reason
        'split backwards: step 27, 33 without'
        """
        if not self.is_split:
            return f"split backwards gain nothing: step {self.makespan:.6g}"
        return f"split backwards: step {self.makespan:.6g}, {self.whole_makespan:.6g} without"


def choose_split(bases: Sequence[Schedule], costs: Costs, kept: Sequence[int]) -> SplitOrder:
    """Return the fastest of some orders, with their backwards split and without.

    Ties go to an order without a split, then to the first base.

    Args:
        bases: Orders of compute with whole backwards, for one placement; each keeps the limits.
        costs: Costs of the placement.
        kept: Most microbatches on each worker, see :func:`~vtp_plugin.plan.schedule.make.fill_waits.fill_waits`.
    """
    wholes = [(time_of_whole(base, costs), base) for base in bases]
    whole_makespan, best = min(wholes, key=lambda pair: pair[0])
    found = whole_makespan
    walks = [(base, True) for base in bases]
    if bases[0].placement.num_vstages == bases[0].placement.num_stages:
        # Also one that takes what is there first. Only its placement counts, so one base is enough.
        walks.append((bases[0], False))
    for (base, keeps_order), patience in product(walks, _PATIENCES):
        try:
            filled, time = fill_waits(base, costs, kept, patience=patience, keeps_order=keeps_order)
        except PlanError:
            continue
        if time < found * (1 - ROUNDING):
            found, best = time, filled
    return SplitOrder(schedule=best, makespan=found, whole_makespan=whole_makespan)
