"""The questions that Megatron puts to the groups of an unequal run are seen, and one that is not in the table fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.group_queries.table import HOSTS
from tests.multiproc.cases.core_cases import Case
from tests.support.hosts import host_name
from tests.support.pool import Pool, PoolError

JOB = "tests.multiproc.jobs.group_queries_job:ask"


def test_an_unknown_caller_fails(pool: Pool, tmp_path: Path) -> None:
    """With its name, the kind of group and the question; the whole world is as in stock Megatron."""
    names = ["size", "place", "place_in_model", "ranks", "source", "world"]
    env = {"VTP_TEST_QUERIES": str(tmp_path)}
    with pytest.raises(PoolError) as error:
        pool.run(3, JOB, {"names": names}, env=env)
    assert set(re.findall(r"megatron.*:\S+ asks a \S+ group: \S+(?=;)", str(error.value))) == {
        f"megatron.planted:Asker.{name} asks a {kind} group: {asks}"
        for name, kind, asks in (
            ("size", "stage", "size"),
            ("place", "pipeline", "get_group_rank"),
            ("place", "pipeline", "get_pipeline_model_parallel_group"),
            ("place_in_model", "model", "get_group_rank"),
            ("place_in_model", "model", "get_model_parallel_group"),
            ("ranks", "stage", "get_process_group_ranks"),
            ("source", "stage", "get_group_rank"),
            ("source", "stage", "get_tensor_model_parallel_src_rank"),
        )
    }
    written = {line for path in tmp_path.iterdir() for line in path.read_text().splitlines()}
    assert "megatron.planted:Asker.size\tstage\tsize" in written
    assert pool.run(3, JOB, {"names": ["world"]}, env=env) == [None, None, None]


@pytest.mark.skipif(host_name() not in HOSTS, reason="not all callers of this Megatron were seen")
def test_the_core_grids_always_record(pool: Pool) -> None:
    """A new caller fails the test that reaches it, without VTP_TEST_QUERIES, too."""
    with pytest.raises(PoolError, match=r"megatron\.planted:Asker\.size asks a stage group: size; read what"):
        pool.run(3, "tests.multiproc.jobs.group_queries_job:train_and_ask", {"case": Case.of(sizes=(1, 2))})
