"""What a run with faults must show, read from its logs: the losses of an undisturbed run, and each sample once.

The functions raise ``AssertionError`` with what is wrong; tests plant a sample that is read twice, and a wrong loss.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.multiproc.elastic import Step

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


def samples_by_step(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], list[str]]:
    """Give the samples that each process read in each step, in the order of reading."""
    found: dict[tuple[int, int], list[str]] = {}
    for entry in entries:
        if entry["event"] == "samples":
            found.setdefault((entry["step"], entry["pid"]), []).extend(entry["digests"])
    return found


def require_samples(entries: Sequence[Mapping[str, Any]], expected: Mapping[int, Sequence[str]]) -> None:
    """Every step reads its own samples, or, if it did not end, the first of them; each sample counts once.

    Args:
        entries: of the log, with one reader in each attempt.
        expected: by step, of the run that nothing happened to.
    """
    whole: dict[int, list[str]] = {}
    for (step, pid), digests in samples_by_step(entries).items():
        assert digests == list(expected[step])[: len(digests)], f"step {step} of process {pid} read other samples"
        whole[step] = digests  # the last process that came so far
    last = max(whole, default=0)
    for step in range(1, last):
        assert whole.get(step) == list(expected[step]), f"step {step} has not read all its samples"
    counted = [digest for step in range(1, last) for digest in whole[step]]
    assert len(counted) == len(set(counted)), "a sample counts twice"


def require_losses(steps: Sequence[Step], expected: Mapping[int, float], batch_size: int = 8) -> None:
    """Every step that was logged, also one that was computed twice, has the loss and the samples of its number.

    Megatron logs the second step after a checkpoint was loaded with the mean of the two.
    """
    start = 1
    for before, step in itertools.pairwise([None, *steps]):
        assert step is not None and step.samples == batch_size * step.iteration
        if before is None or step.attempt != before.attempt:
            start = step.iteration
        loss = expected[step.iteration]
        if 1 < start == step.iteration - 1:
            loss = (loss + expected[start]) / 2
        assert abs(step.loss - loss) <= TOLERANCE * loss, (step, loss)
