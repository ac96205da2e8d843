"""A uniform list builds exactly stock Megatron's groups, with the plugin's builder forced on."""

from __future__ import annotations

import pytest

from tests.support.pool import Pool

JOB = "tests.multiproc.jobs.group_parity_job"
ORDERS = ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp")
# (tp, cp, pp, dp, ep)
SIZES = [
    *((tp, 1, pp, dp, 1) for tp in (1, 2, 3) for pp in (1, 2, 4) for dp in (1, 2, 3)),
    *((tp, 2, pp, dp, 1) for tp in (1, 2) for pp in (1, 3) for dp in (1, 2)),
    *(
        (tp, cp, pp, dp, ep)
        for tp in (1, 2)
        for cp, dp, ep in ((1, 2, 2), (2, 2, 2), (1, 4, 2), (2, 1, 2))
        for pp in (1, 2)
    ),
]
CASES = [
    pytest.param(sizes, order, id=f"tp{sizes[0]}-cp{sizes[1]}-pp{sizes[2]}-dp{sizes[3]}-ep{sizes[4]}-{order}")
    for sizes in SIZES
    for order in ORDERS
    # Megatron refuses replica-major order where the expert and the dense data-parallel sizes differ.
    if order == ORDERS[0] or sizes[2] == 1 or sizes[1] * sizes[3] // sizes[4] == sizes[3]
]
# A world takes seconds; the first part runs by default.
NUM_CHUNKS = 24


def test_there_are_enough_combinations() -> None:
    assert len(CASES) >= 40
    assert len(set(SIZES)) == len(SIZES)


@pytest.mark.parametrize("chunk", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, NUM_CHUNKS))])
def test_uniform_list_builds_stock_groups(pool: Pool, chunk: int) -> None:
    worlds = {}
    for case in CASES[chunk::NUM_CHUNKS]:
        (tp, cp, pp, dp, ep), order = case.values
        sizes = {
            "tensor_model_parallel_size": tp,
            "context_parallel_size": cp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "order": order,
        }
        worlds[case.id] = (sizes, tp * cp * pp * dp)
    (differences,) = pool.run(1, f"{JOB}:compare", {"worlds": worlds})
    assert not differences, "\n".join(differences)


def test_virtual_stages_and_expert_tensor_size(pool: Pool) -> None:
    sizes = {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
    }
    assert pool.run(1, f"{JOB}:compare", {"worlds": {"interleaved": (sizes, 16)}}) == [[]]
