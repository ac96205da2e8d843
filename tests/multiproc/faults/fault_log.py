"""What a run with faults must show, read from its logs: the losses of an undisturbed run, and each sample once.

The functions raise ``AssertionError`` with what is wrong; tests plant a sample that is read twice, and a wrong loss.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.multiproc.faults.elastic import Step
from tests.support.hosts import prints_first_step

TOLERANCE = 1e-5


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines that ranks have appended; the last one may be cut off."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def require_samples(entries: Iterable[Mapping[str, Any]], batch_size: int = 8) -> None:
    """Every step reads its own samples, or, if it did not end, the first of them; so each sample counts once.

    Args:
        entries: of the log; with one replica, of which the first and the last stage read.
        batch_size: samples of a step.
    """
    read: dict[tuple[int, int], list[int]] = {}
    for entry in entries:
        if entry["event"] == "samples":
            read.setdefault((entry["step"], entry["pid"]), []).extend(entry["samples"])
    whole: dict[int, bool] = {}
    for (step, pid), samples in read.items():
        own = [*range(batch_size * (step - 1), batch_size * step)]
        assert samples == own[: len(samples)], f"step {step} of process {pid} read other samples: {samples}"
        whole[step] = samples == own  # the last process that came so far
    for step in range(1, max(whole, default=0)):
        assert whole.get(step), f"step {step} has not read all its samples"


def require_losses(steps: Sequence[Step], expected: Mapping[int, float], batch_size: int = 8) -> None:
    """Every step that was logged, also one that was computed twice, has the loss and the samples of its number.

    Megatron logs the second step after a checkpoint was loaded with the mean of the two; 0.12 does not.
    """
    start = 1
    for before, step in itertools.pairwise([None, *steps]):
        assert step is not None and step.samples == batch_size * step.iteration
        if before is None or step.attempt != before.attempt:
            start = step.iteration
        loss = expected[step.iteration]
        if prints_first_step() and 1 < start == step.iteration - 1:
            loss = (loss + expected[start]) / 2
        assert abs(step.loss - loss) <= TOLERANCE * loss, (step, loss)
