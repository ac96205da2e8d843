"""Both ends of a tied embedding hold one weight, cut differently, at the start and after every step."""

from __future__ import annotations

import pytest
import torch

from tests.multiproc.cases.case_parts import VOCAB
from tests.multiproc.cases.core_cases import DISTRIBUTED, OVERLAPPED, Case, Run, Runs, assert_close, defaults_first

CASES = [
    Case.of(sizes=(1, 2), dp=2),
    Case.of(sizes=(1, 2), dp=2, **OVERLAPPED),
    Case.of(sizes=(2, 1), dp=2, vpp=2, num_microbatches=4, **DISTRIBUTED),
    Case.of(sizes=(2, 3), **OVERLAPPED),
    Case.of(sizes=(1, 4), optimizer="adam"),
    Case.of(sizes=(1, 3), dp=2, bucket_size=1, **DISTRIBUTED),
    Case.of(sizes=(1, 3), dp=2, overlap_grad_reduce=True),
    Case.of(sizes=(2, 1, 2)),
    Case.of(sizes=(3, 1, 2), vpp=2, num_microbatches=3, overlap_grad_reduce=True, overlap_p2p=True),
    Case.of(sizes=(1, 2, 1, 2), dtype="bf16"),
    Case.of(sizes=(2, 3), dp=1, clip=0.05, **DISTRIBUTED),
    Case.of(sizes=(2, 1), cp_list=(1, 2), gathered_attention=True, seq=8, dp=2, **DISTRIBUTED),
]


def ends_over_time(case: Case, run: Run) -> list[list[torch.Tensor]]:
    """Give the whole weight of every end and replica, by moment: start, after step 0, ..."""
    moments = []
    for moment in range(case.data.num_steps + 1):
        wholes = []
        for stage in (0, len(case.stages.sizes) - 1):
            for dp_rank in range(case.stages.dp):
                here = [r for r in run.ranks if (r.stage, r.dp_rank) == (stage, dp_rank)]
                copies = [[r for r in here if r.tp_rank == tp_rank] for tp_rank in range(case.stages.sizes[stage])]
                assert [len(ranks) for ranks in copies] == [case.stages.cp_sizes[stage]] * case.stages.sizes[stage]
                wholes += [torch.cat([r.tied[moment] for r in members]) for members in zip(*copies, strict=True)]
        moments.append(wholes)
    return moments


@pytest.mark.parametrize("case", defaults_first(CASES, 3))
def test_ends_are_equal_to_the_last_bit(runs: Runs, case: Case) -> None:
    case = case.but(tied=True, wants_tied=True)
    run = runs.run(case)
    moments = ends_over_time(case, run)
    assert len(moments) == case.data.num_steps + 1
    for moment, wholes in enumerate(moments):
        for whole in wholes:
            assert whole.shape[0] == VOCAB
            assert torch.equal(whole, wholes[0]), f"ends or replicas differ after {moment} steps"
    assert all(not torch.equal(a[0], b[0]) for a, b in zip(moments, moments[1:], strict=False)), "nothing was trained"
    assert moments[0][0].abs().min(dim=1).values.max() > 0, "the start weight is zero"
    assert_close(run, runs.oracle(case), rel=1e-5 if case.numerics.dtype == "fp32" else 0.02)
