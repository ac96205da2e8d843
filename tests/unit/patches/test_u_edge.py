"""What the edge of a U-shaped pipeline has and its cloud has not: whole batches, and the tokenizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import records_at
from vtp_plugin.patches.training.global_vars import NoTokenizer
from vtp_plugin.plan.schedule.order.placement import u_placement
from vtp_plugin.session import Session
from vtp_plugin.session.session import Pipeline


@pytest.mark.needs("records_of_0_19")
@pytest.mark.parametrize(
    ("is_u_shaped", "first", "last", "pipeline_size"),
    [(True, True, True, 1), (True, False, False, 3), (True, True, False, 3), (False, True, True, 3)],
)
def test_edge_gets_all_of_a_batch(is_u_shaped: bool, first: bool, last: bool, pipeline_size: int) -> None:
    session = Session(VtpConfig(size_list=(1, 2, 2), layerwise_disaggregated=is_u_shaped))
    # Among the records that apply before a script has imported anything.
    records = records_at(session, load_host("0.19"), Moment.COMMAND_LINE)
    (record,) = [record for record in records if record.id == "batch-on-edge"]
    asked: list[dict[str, Any]] = []
    record.build(lambda **kwargs: asked.append(kwargs))(
        is_pipeline_first_stage=first, is_pipeline_last_stage=last, pipeline_model_parallel_size=3
    )
    assert asked[0]["pipeline_model_parallel_size"] == pipeline_size


@pytest.mark.parametrize(("num_rings", "calls"), [(1, [1]), (2, [1, 0])], ids=["one ring", "two rings"])
def test_a_cloud_stage_calls_for_data_as_often_as_the_edge(num_rings: int, calls: list[int]) -> None:
    """Each call talks to all ranks; the edge makes one for each of its chunks, once more at a second start of data."""
    runner: Any = SimpleNamespace(placement=u_placement(3, num_rings=num_rings), num_chunks=num_rings)
    bare: Any = None
    pipeline = Pipeline(plan=bare, stage_group=None, pipeline_groups=(), schedule_runner=runner, agree=bare)
    for _ in range(2):
        assert [pipeline.extra_data_calls() for _ in range(num_rings)] == calls
        assert sum(calls) + num_rings == num_rings + 1


def test_tokenizer_that_is_not_there_says_where_it_is() -> None:
    with pytest.raises(ConfigError, match="asks a cloud stage for the tokenizer's 'eod'.*only the edge has"):
        _ = NoTokenizer().eod
