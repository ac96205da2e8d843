"""Training with split backwards on one rank, and whether they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch.distributed as dist

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.api import _Holder
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.runtime.step.weight_gradients import WeightGradients


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


@contextmanager
def _spoilt(fault: str) -> Iterator[None]:
    compute, num_calls = WeightGradients.compute, 0

    def spoilt(self: WeightGradients, vstage: int, microbatch: int) -> None:
        nonlocal num_calls
        num_calls += 1
        waiting = self._waiting[vstage, microbatch]
        if num_calls == 2 and fault == "left out":
            waiting.clear()
        elif num_calls == 2 and fault == "doubled":
            waiting *= 2
        elif num_calls == 2 and fault:
            waiting[0] = replace(waiting[0], inputs=waiting[0].inputs.roll(1, dims=0))
        compute(self, vstage, microbatch)

    if fault and dist.get_rank() == 0:
        WeightGradients.compute = spoilt
    try:
        yield
    finally:
        WeightGradients.compute = compute


def own_computes() -> list[Action]:
    """List what this rank computed in its first training steps; none of their gradients of weights may be waiting.

    Later steps may have another order, which depends on what was measured.
    """
    assert _Holder.session is not None
    runner = _Holder.session.running.require_schedule_runner()
    assert not runner.weight_gradients._waiting
    schedule = next(one for one in runner._schedules.values() if not one.forward_only)
    return [action for action in schedule.orders[runner._worker] if action.op.is_compute]


def num_split() -> int:
    """Count the backwards of this rank's first training step that were split."""
    return sum(action.op is Op.I for action in own_computes())


def train(case: Case, fault: str = "") -> SplitResult:
    """Run a case on this rank; `fault` says what goes wrong once on rank 0."""
    init_gloo()
    with applied(case, force=False), model_parallel(case):
        trainer = Trainer(case)
        try:
            with _spoilt(fault):
                result = trainer.run()
            order = own_computes()
            apart = [
                1
                for before, action in zip(order, order[1:], strict=False)
                if action.op is Op.W and (before.op, before.microbatch) != (Op.I, action.microbatch)
            ]
            return SplitResult(result=result, num_apart=len(apart), num_split=num_split())
        finally:
            trainer.close()
