"""Data sets that are too small end a run in a line on every rank; Megatron's code loops, or names no set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.multiproc.cases.script_cases import arguments, launch, num_ranks
from tests.support.lines import error_line
from tests.support.pool import Pool

_EVALUATE = ("--eval-iters", "1", "--eval-interval", "2")


def _write(path: Path, lengths: Sequence[int]) -> str:
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.int32)
    for length in lengths:
        builder.add_document(torch.arange(length, dtype=torch.int32) % 50, [length])
    builder.finalize(f"{path}.idx")
    return str(path)


@pytest.mark.parametrize(
    ("sizes", "weights", "split", "expected"),
    [
        ("1,2", ("0.999999", "0.000001"), "90,5,5", "its valid split has none of its 3 documents, "),
        pytest.param("1,1", (), "90,5,5", "its valid split has none of its 1 documents, ", marks=pytest.mark.full),
        pytest.param("1,2", ("",), "100,0,0", "every set of the train split needs a sample", marks=pytest.mark.full),
    ],
)
def test_refused(pool: Pool, tmp_path: Path, sizes: str, weights: Sequence[str], split: str, expected: str) -> None:
    """An empty split of a blend, of one set alone, and a blend by numbers of samples of a set without one."""
    big, tiny = _write(tmp_path / "big", [40] * 3), _write(tmp_path / "tiny", [5])
    paths = {0: [tiny], 1: [big, tiny]}.get(len(weights)) or [weights[0], big, weights[1], tiny]
    data = ["--data-path", *paths, "--split", split, "--data-cache-path", str(tmp_path / "cache"), *_EVALUATE]
    command = [word for word in arguments(sizes, extra=data) if word != "--mock-data"]
    runs = launch(pool, num_ranks(sizes), {"arguments": command})
    for run in runs:  # others wait for rank 0 in a barrier
        assert run.exit_code == 1 and "Traceback" not in run.output, run.output[-2500:]
        assert expected in (error_line(run.output) or ""), run.output[-3000:]
