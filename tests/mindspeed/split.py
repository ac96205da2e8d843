"""Runs with split backwards: their flags, whether any was split, and one that goes wrong on purpose."""

from __future__ import annotations

from pathlib import Path

from vtp_plugin.trace.stretches import Cause, read_files

PLANNED = ("--vtp-schedule", "planned")
SPLIT = "--vtp-split-backward"


def costs(*forward_ms: int) -> tuple[str, str]:
    """Give costs of the virtual stages, so that every step has the order of the first."""
    return ("--vtp-costs", "forward_ms=" + ",".join(map(str, forward_ms)))


def num_split(trace: Path) -> int:
    """Count the backwards, of all ranks and traced steps, whose gradients of weights were computed apart."""
    stretches = [one for file in read_files(trace) for step in file.steps for one in step.stretches]
    return sum(one.cause is Cause.WEIGHTS for one in stretches)


def leave_one_out() -> None:
    """Let each split backward of this process forget the gradient of one weight."""
    from vtp_plugin.runtime.step.weight_gradients import WeightGradients

    compute = WeightGradients.compute

    def forgetful(self: WeightGradients, vstage: int, microbatch: int) -> None:
        self._waiting[vstage, microbatch].pop()
        compute(self, vstage, microbatch)

    WeightGradients.compute = forgetful
