"""Modules whose stages differ in size, several in one world: what the plugin keeps is each module's own."""

from __future__ import annotations

import pytest

from tests.support.pool import Pool

pytest.importorskip("megatron.core.hyper_comm_grid", reason="this Megatron has no megatron.core.hyper_comm_grid")


def test_two_modules_with_stages_of_their_own_in_one_world(pool: Pool) -> None:
    """Every tensor says of which module and stage it is."""
    modules = (((1, 1, 1), (2, 1, 1)), ((2, 1, 1), (1, 1, 1), (2, 1, 1)))
    problems = pool.run(8, "tests.multiproc.jobs.stage_grid_job:cross", {"modules": modules, "num_microbatches": 3})
    assert [problem for rank in problems for problem in rank] == []
