"""MindSpeed-MM's own data pipeline, with batches of their own lengths: stages of unequal size train as one rank does.

Opt-in, as :mod:`tests.mindspeed.test_mm_lane`. The script reads JPEGs by its ``dataset_type: huggingface``, its
converter and its collator, which pads a batch to a multiple of 8: nothing of the data is replaced.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed.mm import own_data
from tests.mindspeed.mm.model import TEXT_LAYERS, VISION_LAYERS
from tests.mindspeed.test_mm_lane import (
    DEVICE,
    OF_THE_ORACLE,
    STEPS,
    Numbers,
    assert_equal,
    needs_trees,
    numbers,
    oracle,
    start,
    start_u,
    trained,
)
from tests.multiproc.cases.script_cases import num_ranks

pytestmark = [pytest.mark.full, needs_trees]
LENGTH = ("--seq-length", str(own_data.SEQUENCE))
OWN_LENGTHS = (*LENGTH, "--variable-seq-lengths")
READ: dict[str, Any] = {"has_own_data": True}
U_LISTS = [[VISION_LAYERS, 0], [0, 0]], [[1, 2], [1, 0]]


def one_rank(*extra: str, dp: int = 1) -> Numbers:
    """The oracle: the unmodified script, one rank for each replica."""
    return oracle(*OWN_LENGTHS, *extra, dp=dp, **READ)


def test_one_rank_learns_from_its_data() -> None:
    found = one_rank()
    assert found["losses"][-1] < found["losses"][0] and len(found["losses"]) == STEPS


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [("1,2", (), 1), ("1,2", ("--sequence-parallel",), 1), ("1,2", OF_THE_ORACLE, 2)],
    ids=["1,2", "sequence parallelism", "dp 2"],
)
def test_a_pipeline_of_own_lengths_equals_one_rank(sizes: str, extra: tuple[str, ...], dp: int) -> None:
    words = (*DEVICE, "--vtp-size-list", sizes, *OWN_LENGTHS, *extra)
    found = trained(num_ranks(sizes, dp), [VISION_LAYERS, 0], [2, 2], *words, is_run=True, dp=dp, **READ)
    assert_equal(found, one_rank(*(word for word in extra if word in OF_THE_ORACLE), dp=dp))


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [("1,2", (), 1), ("2,1", (), 1), ("1,2", ("--sequence-parallel", *OF_THE_ORACLE), 2)],
    ids=["1,2", "an edge of two ranks", "dp 2"],
)
def test_a_u_of_own_lengths_equals_one_rank(tmp_path: Path, sizes: str, extra: tuple[str, ...], dp: int) -> None:
    audit = ("--vtp-audit", str(tmp_path / "audit.jsonl"))
    code, output = start_u(sizes, *U_LISTS, *OWN_LENGTHS, *extra, *audit, dp=dp, **READ)
    assert code == 0, output[-6000:]
    assert_equal(numbers(output), one_rank(*(word for word in extra if word in OF_THE_ORACLE), dp=dp))
    records = [json.loads(line) for file in tmp_path.glob("audit.*") for line in file.read_text().splitlines()]
    crossed = {(record["cargo"], record["dtype"]) for record in records if "cargo" in record}
    floats = {(kind, "float32") for kind in ("activation", "gradient", "warm-up")}
    assert crossed == {*floats, ("positions", "int32"), ("shape header", "int64")}, crossed
    lengths = {record["shape"][0] for record in records if record.get("cargo") == "positions"}
    assert len(lengths) > 2 and all(length % 8 == 0 for length in lengths), lengths


@pytest.mark.parametrize("is_u_shaped", [True, False], ids=["U", "plain"])
def test_own_lengths_without_the_flag_are_one_line(is_u_shaped: bool) -> None:
    words = (*LENGTH, "--vtp-timeout-s", "60")
    code, output = (
        start_u("1,2", *U_LISTS, *words, **READ)
        if is_u_shaped
        else start(3, [VISION_LAYERS, 0], [2, 2], *DEVICE, "--vtp-size-list", "1,2", *words, is_run=True, **READ)
    )
    assert code != 0 and output.count("Traceback (most recent call last)") == 1, output[-6000:]
    assert re.search(rf"a batch of \(2, \d+\) tokens; .*\(2, {own_data.SEQUENCE}\), .* --variable-seq-lengths", output)


def test_what_its_tensor_parallelism_differs_by() -> None:
    """Sums in another order: MindSpeed-MM's own two ranks of one stage beside one rank, judged as those above."""
    two = trained(2, [VISION_LAYERS], [TEXT_LAYERS], "--tensor-model-parallel-size", "2", *OWN_LENGTHS, **READ)
    assert_equal(two, one_rank())
