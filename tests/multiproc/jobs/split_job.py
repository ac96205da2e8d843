"""Training with split backwards on one rank, and whether they were."""

from __future__ import annotations

from dataclasses import dataclass

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.api import _Holder
from vtp_plugin.plan.schedule.order.actions import Op


@dataclass(slots=True, kw_only=True)
class SplitResult:
    """What one rank saw.

    Attributes:
        result: as of a run without a split.
        num_apart: gradients of weights that this rank's order of a training step computes later than those of inputs,
            with other computes between.
        num_split: backwards of the order that are split.
    """

    result: RankResult
    num_apart: int
    num_split: int


def train(case: Case, costs: str | None = None) -> SplitResult:
    """Run a case on this rank; `costs` is as ``--vtp-costs``."""
    init_gloo()
    with applied(case, force=False, costs=costs), model_parallel(case):
        trainer = Trainer(case)
        try:
            result = trainer.run()
            assert _Holder.session is not None
            runner = _Holder.session.running.require_schedule_runner()
            (schedule, *_) = [one for one in reversed(runner._schedules.values()) if not one.forward_only]
            order = [action for action in schedule.orders[runner._worker] if action.op.is_compute]
            apart = [
                1
                for before, action in zip(order, order[1:], strict=False)
                if action.op is Op.W and (before.op, before.microbatch) != (Op.I, action.microbatch)
            ]
            assert not runner.weight_gradients._waiting
            return SplitResult(
                result=result, num_apart=len(apart), num_split=sum(action.op is Op.I for action in order)
            )
        finally:
            trainer.close()
