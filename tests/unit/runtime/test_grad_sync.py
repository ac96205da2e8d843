"""When a step calls Megatron's hooks for gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vtp_plugin.runtime.step.weight_gradients import GradSync

# The order in which a stage with two chunks runs two microbatches: chunk, whether it is the chunk's last backward.
BACKWARDS = [(1, False), (1, True), (0, False), (0, True)]
# What makes a backward, and whether gradients of weights are still to come.
WHOLE = [("B", False)]
SPLIT = [("I", True), ("W", False)]


class Run:
    """Notes in which backward gradients may be summed, and which chunk's hook is called when."""

    def __init__(self, num_chunks: int) -> None:
        self.chunks = [torch.nn.Linear(1, 1) for _ in range(num_chunks)]
        self.num_open = 0
        self.events: list[str] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.num_open += 1
        yield
        self.num_open -= 1

    def hook(self, name: str, chunk: int) -> Any:
        def call(parameters: Iterator[torch.nn.Parameter]) -> None:
            assert [id(p) for p in parameters] == [id(p) for p in self.chunks[chunk].parameters()]
            self.events.append(f"{name} {chunk}, {'silent' if self.num_open else 'open'}")

        return call

    def step(
        self,
        *,
        aligned: bool,
        is_first_stage: bool,
        forward_only: bool = False,
        as_list: bool = True,
        parts: Sequence[tuple[str, bool]] = WHOLE,
    ) -> None:
        num_chunks = len(self.chunks)
        config = SimpleNamespace(
            no_sync_func=[self.no_sync] * num_chunks if as_list else self.no_sync,
            grad_sync_func=[self.hook("grad", i) for i in range(num_chunks)] if aligned else None,
            param_sync_func=[self.hook("param", i) for i in range(num_chunks)],
        )
        sync = GradSync(config, self.chunks, forward_only=forward_only, is_first_stage=is_first_stage)
        with sync.step():
            for chunk in range(num_chunks):
                sync.before_forward(chunk)
            for chunk, is_last in BACKWARDS if not forward_only else ():
                for part, has_rest in parts if chunk < num_chunks else ():
                    with sync.backward(chunk, is_last=is_last, has_rest=has_rest):
                        self.events.append(f"{part}{chunk}, {'silent' if self.num_open else 'open'}")
        assert self.num_open == 0


@pytest.mark.parametrize("as_list", [False, True])
def test_last_backward_of_each_chunk_sums_inside(as_list: bool) -> None:
    run = Run(2)
    run.step(aligned=False, is_first_stage=False, as_list=as_list)
    assert run.events[2:] == ["B1, silent", "B1, open", "B0, silent", "B0, open"]


def test_aligned_sums_begin_behind_the_last_backward() -> None:
    run = Run(2)
    run.step(aligned=True, is_first_stage=False)
    assert run.events[2:] == ["B1, silent", "B1, silent", "grad 1, open", "B0, silent", "B0, silent", "grad 0, open"]


def test_first_chunk_of_the_first_stage_has_nothing_to_hide_its_sum_behind() -> None:
    run = Run(2)
    run.step(aligned=True, is_first_stage=True)
    assert run.events[2:] == ["B1, silent", "B1, silent", "grad 1, open", "B0, silent", "B0, open"]


def test_norms_are_summed_with_the_last_inputs_and_linear_layers_with_the_last_weights() -> None:
    """Of split backwards; aligned sums begin once both are there."""
    run = Run(2)
    run.step(aligned=False, is_first_stage=False, parts=SPLIT)
    silent, opened = ["I{}, silent", "W{}, silent"], ["I{}, open", "W{}, open"]
    assert run.events[2:] == [event.format(chunk) for chunk in (1, 0) for event in (*silent, *opened)]
    run = Run(2)
    run.step(aligned=True, is_first_stage=True, parts=SPLIT)
    wanted = [(1, [*silent, *silent, "grad {}, open"]), (0, [*silent, *opened])]
    assert run.events[2:] == [event.format(chunk) for chunk, events in wanted for event in events]


def test_weights_are_gathered_one_chunk_ahead() -> None:
    run = Run(3)
    run.step(aligned=False, is_first_stage=True)
    assert [event for event in run.events if event.startswith("param")] == [f"param {i}, silent" for i in range(3)]
    single = Run(1)
    single.step(aligned=False, is_first_stage=True)
    assert single.events == ["B0, silent", "B0, open"]


def test_evaluation_calls_no_hook() -> None:
    run = Run(2)
    run.step(aligned=True, is_first_stage=True, forward_only=True)
    assert run.events == []
