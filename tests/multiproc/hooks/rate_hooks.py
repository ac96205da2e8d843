"""Other rates from the third step on, set by hand: what a resume with other rates is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megatron.training.training as training
from megatron.training import get_args

from tests.multiproc.cases.other_rates import OTHER, OTHER_DECOUPLED


def set_rates(facts: dict[str, Any]) -> None:
    """Give the groups of parameters other rates before the third step, and the scheduler another decay."""

    def change(optimizer: Any, scheduler: Any) -> None:
        scheduler.start_wd = scheduler.end_wd = OTHER["weight_decay"]
        scheduler.max_lr, scheduler.min_lr = OTHER["lr"], OTHER["min_lr"]
        for group in optimizer.param_groups:
            is_apart = group.get("is_decoupled_lr") or not group.get("default_config", True)
            group["max_lr"] = OTHER_DECOUPLED["decoupled_lr"] if is_apart else OTHER["lr"]
            group["min_lr"] = OTHER_DECOUPLED["decoupled_min_lr"] if is_apart else OTHER["min_lr"]
        scheduler.step(0)

    _before_third_step(change)


def note_rates(facts: dict[str, Any]) -> None:
    """Note what a step trains with: rate and decay of every group, and samples before it."""
    facts["rates"] = []

    def note(optimizer: Any, scheduler: Any) -> None:
        shown = {(group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
        facts["rates"].append((get_args().consumed_train_samples, sorted(shown)))

    _before_steps(note)


def _before_third_step(act: Callable[[Any, Any], None]) -> None:
    def acting(optimizer: Any, scheduler: Any) -> None:
        if get_args().curr_iteration == 2:
            act(optimizer, scheduler)

    _before_steps(acting)


def _before_steps(act: Callable[[Any, Any], None]) -> None:
    original = training.train_step

    def acting_train_step(
        step: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> Any:
        act(optimizer, scheduler)
        return original(step, data, model, optimizer, scheduler, *args, **kwargs)

    training.train_step = acting_train_step
