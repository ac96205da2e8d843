"""A weight whose mark says something else than how it is cut is refused before the first step, on all ranks."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import Case
from tests.support.pool import Pool

_CUT = "decoder.layers.0.mlp.linear_fc1.weight"
_WHOLE = "decoder.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("end", "is_marked", "rule"),
    [
        (_CUT, False, "has no tensor_model_parallel mark and sharded_state_dict cuts it"),
        (_WHOLE, True, "has a tensor_model_parallel mark and sharded_state_dict stores it whole"),
    ],
    ids=["cut", "whole"],
)
def test_a_wrong_mark_is_refused_on_all_ranks(pool: Pool, end: str, is_marked: bool, rule: str) -> None:
    def build(case: Case) -> set[str]:
        options = {"case": case, "end": end, "is_marked": is_marked}
        return set(pool.run(case.world_size, "tests.multiproc.jobs.marks_job:build", options))

    (line,) = build(Case.of(sizes=(1, 2)))
    assert line.startswith(f"rank 1, 2: {end} {rule}; ") and "\n" not in line
    assert build(Case.of(sizes=(2, 2))) == {""}, "a uniform list is Megatron's"
