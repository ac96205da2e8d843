"""Training with split backwards on one rank, and whether they were."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo
from vtp_plugin.api import _Holder
from vtp_plugin.errors import PlanError
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op, Schedule
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.weight_gradients import WeightGradients


@dataclass(slots=True, kw_only=True)
class SplitResult:
    """What one rank saw.

    Attributes:
        result: as of a run without a split.
        num_apart: gradients of weights that this rank's order of a training step computes later than those of inputs,
            with other computes between.
        num_split: backwards of the order that are split.
        complete: by parameter: in which compute, `B`, `I` or `W`, DDP was told that its gradient is complete, once for
            each step; empty where sums do not overlap with backwards.
    """

    result: RankResult
    num_apart: int
    num_split: int
    complete: dict[str, str]


@contextmanager
def _spoilt(fault: str) -> Iterator[None]:
    """Let something go wrong: on the last rank, but buckets leave alike on all; nothing if the fault has no name."""
    compute, run, is_last, num_calls = WeightGradients.compute, ScheduleRunner.run, Executor._is_last, 0

    def of_one_microbatch(self: WeightGradients, vstage: int, microbatch: int) -> None:
        nonlocal num_calls
        num_calls += 1
        waiting = self._waiting[vstage, microbatch]
        if num_calls == 2 and fault == "left out":
            waiting.clear()
        elif num_calls == 2 and fault == "doubled":
            waiting *= 2
        elif num_calls == 2:
            right = waiting[0].product
            waiting[0] = replace(waiting[0], product=lambda inputs, gradient: right(inputs.roll(1, dims=0), gradient))
        compute(self, vstage, microbatch)

    def before_its_input(self: ScheduleRunner, schedule: Schedule, *args: Any) -> None:
        orders = list(schedule.orders)
        orders[self._worker] = _too_early(orders[self._worker])
        try:
            run(self, replace(schedule, orders=tuple(orders)), *args)
        except PlanError:
            traceback.print_exc()
            os._exit(1)  # others wait for this rank, and revert() would wait for them

    def before_the_last(self: Executor, action: Action) -> bool:
        was_last = is_last(self, action)
        return self._num_left[action.vstage, Op.W] == 1 if action.op is Op.W else was_last

    with pytest.MonkeyPatch.context() as patch:
        if fault == "after its bucket left":
            patch.setattr(Executor, "_is_last", before_the_last)
        elif fault and dist.get_rank() == dist.get_world_size() - 1:
            if fault == "before its input's":
                patch.setattr(ScheduleRunner, "run", before_its_input)
            else:
                patch.setattr(WeightGradients, "compute", of_one_microbatch)
        yield


def _too_early(order: Actions) -> Actions:
    """Compute the first gradient of weights directly before that of its input."""
    late = next(action for action in order if action.op is Op.W)
    others = [action for action in order if action != late]
    place = others.index(replace(late, op=Op.I))
    return (*others[:place], late, *others[place:])


@contextmanager
def _noting_completion(complete: dict[int, str]) -> Iterator[None]:
    """Note what DDP is told, by the id of the parameter."""
    group: Any = param_and_grad_buffer._ParamAndGradBucketGroup
    backward, compute, register, part = (
        WeightGradients.backward,
        WeightGradients.compute,
        group.register_grad_ready,
        "B",
    )

    @contextmanager
    def of_input(self: WeightGradients, *args: Any) -> Iterator[None]:
        nonlocal part
        part = "I"
        with backward(self, *args):
            yield
        part = "B"

    def of_weights(self: WeightGradients, *args: int) -> None:
        nonlocal part
        part = "W"
        compute(self, *args)
        part = "B"

    def noting(self: Any, parameter: Any, *args: Any) -> None:
        if self.is_last_microbatch:
            complete[id(parameter)] = complete.get(id(parameter), "") + part
        register(self, parameter, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightGradients, "backward", of_input)
        patch.setattr(WeightGradients, "compute", of_weights)
        patch.setattr(group, "register_grad_ready", noting)
        yield


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
    """Run a case on this rank; `fault` says what goes wrong."""
    init_gloo()
    complete: dict[int, str] = {}
    with applied(case, force=False), model_parallel(case):
        trainer = Trainer(case)
        try:
            with _spoilt(fault), _noting_completion(complete):
                result = trainer.run()
            order = own_computes()
            apart = [
                1
                for before, action in zip(order, order[1:], strict=False)
                if action.op is Op.W and (before.op, before.microbatch) != (Op.I, action.microbatch)
            ]
            names = {id(parameter): name for chunk in trainer.model for name, parameter in chunk.named_parameters()}
            return SplitResult(
                result=result,
                num_apart=len(apart),
                num_split=num_split(),
                complete={names[key]: parts for key, parts in complete.items()},
            )
        finally:
            trainer.close()
