"""In a U the edge alone builds the data sets: what they do with torch's world they do with the edge's ranks."""

from __future__ import annotations

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, assert_same_training, losses

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
ONE_STEP = ["--train-iters", "1"]


def test_the_edge_meets_itself_and_trains_on(scripts: Scripts) -> None:
    """Each of its two chunks has iterators, so the script's provider runs twice."""
    runs = scripts.train("2,1", [*U_SHAPE, *ONE_STEP], hooks=["meet_while_building"])
    here = [[(rank, 2, 2, [0, 1], [0], 2)] * 2 for rank in range(2)]
    assert [run.facts["met"] for run in runs] == [*here, []]
    assert len(losses(runs)) == 1
    assert_same_training(runs, scripts.train("2,1", [*U_SHAPE, *ONE_STEP]))


def test_in_a_pipeline_the_world_is_all_ranks(scripts: Scripts) -> None:
    runs = scripts.train("1,2", ONE_STEP, hooks=["meet_while_building"])
    assert {met[1:3] for run in runs for met in run.facts["met"]} == {(3, 3)}


def test_a_group_that_only_the_edge_would_make_is_refused(scripts: Scripts) -> None:
    kwargs = {"arguments": arguments("2,1", extra=[*U_SHAPE, *ONE_STEP]), "hooks": ["group_while_building"]}
    *edge, cloud = scripts.launch(3, kwargs)
    reason = "a process group made while the script's provider builds its data sets; "
    assert_refused(edge, reason, "make it before")
    # It waits in a collective of Megatron's, which may break before it is told.
    assert cloud.exit_code not in (0, None) and reason in cloud.output, cloud.output[-3000:]
