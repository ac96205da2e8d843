"""Which computes of a step are the last of their kind, so that gradients are complete behind them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.actions import Action, parse_actions
from vtp_plugin.plan.schedule.proof.check_schedule import check
from vtp_plugin.runtime.step.executor import Executor


class Noting:
    """Notes the last ones."""

    def __init__(self) -> None:
        self.last: list[str] = []

    def forward(self, action: Action, activation: Any, *, is_split: bool) -> torch.Tensor:
        return torch.zeros(())

    def backward(self, action: Action, *tensors: Any, is_last: bool) -> None:
        self.last += [str(action)] * is_last

    def weights(self, action: Action, *, is_last: bool) -> None:
        self.last += [str(action)] * is_last

    def release(self, output: torch.Tensor) -> None:
        pass


@pytest.mark.parametrize(
    ("order", "last"),
    [
        ("0F0 0B0 0F1 0B1", ["0B1"]),
        ("0F0 0I0 0F1 0I1 0W0 0W1", ["0I1", "0W1"]),
        ("0F0 0B0 0F1 0I1 0W1", ["0I1", "0W1"]),
        ("0F0 0I0 0F1 0W0 0B1", ["0B1"]),
    ],
)
def test_parts_and_whole_backwards_count_together(order: str, last: list[str]) -> None:
    schedule = replace(one_f_one_b(1, 2), orders=(parse_actions(order),))
    assert check(schedule) == ()
    noting: Any = Noting()
    Executor(schedule, 0, {}, noting).run()
    assert noting.last == last
