"""The fixed orders are those of the installed Megatron: its own table, warm-up count and groups are the oracle."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from tests.expected import schedule_oracle as oracle
from vtp_plugin.plan.schedule.make.u_shape import interleaved_one_f_one_b, one_f_one_b

CASES = [
    (1, None, 3, 1),
    (2, None, 1, 1),
    (3, None, 2, 1),
    (4, None, 9, 1),
    (2, 2, 2, 2),
    (2, 3, 8, 3),
    (3, 2, 6, 3),
    (3, 3, 11, 4),
    (4, 2, 8, 4),
    (4, 2, 14, 5),
    (4, 4, 16, 8),
]


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "num_microbatches", "group_size", "forward_only"),
    [(*case, False) for case in CASES] + [(*case, True) for case in CASES if case[1]],
)
def test_orders_are_megatrons(
    num_stages: int, num_chunks: int | None, num_microbatches: int, group_size: int, forward_only: bool
) -> None:
    if num_chunks is None:
        schedule = one_f_one_b(num_stages, num_microbatches)
    else:
        schedule = interleaved_one_f_one_b(
            num_stages, num_chunks, num_microbatches, group_size=group_size, forward_only=forward_only
        )
    for stage in range(num_stages):
        found = oracle.words(schedule.orders[stage])
        assert found == megatrons_order(num_stages, stage, num_chunks, num_microbatches, group_size, forward_only)


def megatrons_order(
    num_stages: int, stage: int, num_chunks: int | None, num_microbatches: int, group_size: int, forward_only: bool
) -> list[str]:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    count = schedules.get_pp_rank_microbatches
    options: dict[str, object] = {"forward_only": forward_only}
    with pytest.MonkeyPatch.context() as patch:
        if "p2p_communicator" in inspect.signature(count).parameters:
            group = SimpleNamespace(size=lambda: num_stages, rank=lambda: stage)
            options["p2p_communicator"] = SimpleNamespace(
                pp_group=group, virtual_pipeline_model_parallel_size=num_chunks
            )
        else:
            if num_stages == 1:
                pytest.skip("this Megatron counts for several stages only; with one it runs another schedule")
            # Megatron 0.12 asks for the sizes of the run.
            sizes = {"": num_stages, "virtual_": num_chunks}
            for kind, size in sizes.items():
                name = f"get_{kind}pipeline_model_parallel_world_size"
                patch.setattr(schedules.parallel_state, name, lambda size=size: size)
            patch.setattr(schedules.parallel_state, "get_pipeline_model_parallel_rank", lambda: stage)
        total, _, num_warmup, num_remaining = count(num_microbatches, num_chunks or 1, group_size, **options)
    table = schedules.get_schedule_table(num_microbatches, num_chunks or 1, group_size if num_chunks else 1)
    last_chunk = (num_chunks or 1) - 1
    forwards = [f"{chunk * num_stages + stage}F{n}" for n, chunk in table]
    backwards = [f"{(last_chunk - chunk) * num_stages + stage}B{n}" for n, chunk in table]
    assert len(forwards) == total
    order = forwards[:num_warmup]
    for k in range(num_remaining):
        order += [forwards[num_warmup + k], backwards[k]]
    return order if forward_only else order + backwards[num_remaining:]
