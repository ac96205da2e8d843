"""Every family of Megatron versions trains as its uniform run does: losses and gradient norms over three steps.

This is the grid that older families run. On the newest one ``test_parity`` tries much more.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("core_grid_of_older")

PER_TOKEN = {"per_token_loss": True, "loss_tuple": 3, "masked": True}
DISTRIBUTED = {"optimizer": "adam", "distributed_optimizer": True}
MIXED = {"has_bias": False, "seq": 12, "sequence_parallel": True, "ep_list": (1, 2), "etp": 1}
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 500}
OF_STAGES = ("dp_list", "ep_list", "etp", "schedule", "sequence_parallel", "split_backward", "transport")
TOLERANCE = 1e-5


def train(pool: Pool, case: Case) -> list[RankResult]:
    world_size = sum(tp * dp * case.stages.cp for tp, dp in zip(case.stages.sizes, case.stages.dp_sizes, strict=True))
    return pool.run(world_size, "tests.multiproc.jobs.core_job:train", {"case": case})


def losses(results: list[RankResult], num_stages: int) -> list[float]:
    """Give all losses of the run, in an order that does not depend on how replicas share the microbatches."""
    last = [result for result in results if result.stage == num_stages - 1 and result.tp_rank == 0]
    return sorted(loss for result in last for step in result.losses for loss in step)


@pytest.mark.needs("experts", cases=("(1, 2)-{'experts'",))
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((1, 2), {}, marks=pytest.mark.smoke),
        ((3, 2), {"tied": True}),
        ((2, 1), PER_TOKEN),
        ((1, 2), {"sequence_parallel": True, "seq": 12}),
        ((1, 2, 1), {"vpp": 2, "num_microbatches": 6}),
        ((1, 2), {"dp": 2, **DISTRIBUTED}),
        ((1, 2), {"schedule": "planned"}),
        ((2, 3), {"schedule": "planned", "tied": True, **PER_TOKEN}),
        ((1, 2), {"dp": 2, "split_backward": True, "schedule": "planned", "num_microbatches": 6, **OVERLAPPED}),
        ((1, 2), {"transport": "rank0", "varying_lengths": True}),
        ((1, 1), {"dp_list": (1, 2), "num_microbatches": 4}),
        ((2, 1), {"dp_list": (1, 2), "num_microbatches": 4, **DISTRIBUTED}),
        ((1, 2), {"experts": "gathered", **MIXED, **DISTRIBUTED}),
        ((1, 2), {"experts": "biased", **MIXED, "dp_list": (2, 1), "num_microbatches": 4}),
    ],
    ids=str,
)
def test_it_trains_as_the_uniform_run(pool: Pool, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    ours = train(pool, Case.of(sizes=sizes, num_steps=3, **options))
    # Without a stage of another size the plugin stays out of the way: groups and schedules are Megatron's.
    plain = {name: value for name, value in options.items() if name not in OF_STAGES}
    if "dp_list" in options:
        plain["dp"] = options["dp_list"][-1]
    uniform = train(pool, Case.of(sizes=(1,) * len(sizes), plugin="stock", num_steps=3, **plain))
    wanted = losses(uniform, len(sizes))
    assert len(wanted) >= 3
    assert losses(ours, len(sizes)) == pytest.approx(wanted, rel=TOLERANCE)
    for result in ours:
        assert result.grad_norms == pytest.approx(uniform[0].grad_norms, rel=TOLERANCE)
