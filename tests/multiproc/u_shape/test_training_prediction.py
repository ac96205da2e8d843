"""A layout of the shape of Megatron's own example, ``Et*3|(tt|)*29,m|L``: a stage of its own predicts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import Scripts, assert_same_training, uniform
from tests.support.hosts import is_older

pytestmark = [pytest.mark.needs("layouts"), pytest.mark.needs("scripts_here")]

PREDICTING = ["--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.5", "--global-batch-size", "12"]
PREDICTING += ["--position-embedding-type", "rope", "--no-rope-fusion", "--pipeline-model-parallel-layout"]
UNTIED = ["--untie-embeddings-and-output-weights"]


def _case(name: str, sizes: str, layout: str, *extra: str, full: bool = True) -> Any:
    return pytest.param(sizes, layout, list(extra), id=f"{name}-{sizes}", marks=[pytest.mark.full] if full else [])


@pytest.mark.parametrize(
    ("sizes", "layout", "extra"),
    [
        _case("short", "1,2,1", "Et*4|m|L", *UNTIED, full=False),
        _case("list", "1,2,1,2,1", "Et*2|(t|)*2,m|L", *UNTIED),
        # Adam makes more of rounding on Megatron 0.16.
        _case("list-tied", "2,1,1,2,1", "Et*2|(t|)*2,m|L", "--optimizer", "sgd", "--lr", "1e-1"),
        # Two chunks a stage: the second stage predicts in its second one.
        _case("interleaved", "2,1,2", "Et|(t|)*3,m|L", *UNTIED),
        _case("interleaved-tied", "1,2,1", "Et|(t|)*3,m|L"),
        # From the stage that predicts on, sequences are cut alike.
        _case("sequence", "1,2,2", "Et|(t|)*3,m|L", "--sequence-parallel"),
    ],
)
def test_a_stage_that_predicts(scripts: Scripts, sizes: str, layout: str, extra: list[str]) -> None:
    hooks = ["own_predictions"] if is_older() else []
    runs, wanted = (scripts.train(s, [*PREDICTING, layout, *extra], hooks=hooks) for s in (sizes, uniform(sizes)))
    assert_same_training(runs, wanted)
    if is_older():
        return
    printed = [re.findall(r"mtp_1 loss: (\S+)", group[-1].output) for group in (runs, wanted)]
    assert len(printed[0]) == 4 and len(set(printed[0])) == 4
    assert list(map(float, printed[0])) == pytest.approx(list(map(float, printed[1])), rel=1e-5)
