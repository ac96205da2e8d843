"""The U-shaped pipeline equals the sequential model, from one common checkpoint; and its edge has a seed of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.multiproc.boundaries.test_ordering import Recordings
from tests.multiproc.cases.core_cases import (
    DISTRIBUTED,
    OVERLAPPED,
    PER_TOKEN,
    Case,
    Row,
    Run,
    Runs,
    assemble,
    assert_identical,
    defaults_first,
    pairwise,
)
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape, sequential, u_shaped
from tests.ordering.check import check
from tests.ordering.models import MODELS
from tests.ordering.trace import Kind
from tests.support.pool import Pool

JOBS = "tests.multiproc.jobs.variants"
MAX_WORLD = 8
# Microbatches 1 to 8: fewer than stages, as many, and more.
RAMPUP: dict[str, Any] = {"num_microbatches": 1, "rampup": True, "num_steps": 8}
LISTS = [(1, 1), (1, 2), (1, 2, 2), (2, 1, 3), (1, 1, 1, 1), (1, 2, 1, 2, 1)]
AXES: dict[str, Mapping[str, dict[str, Any]]] = {
    "steps": {"rampup": RAMPUP, "few": {"num_microbatches": 2}, "evaluated": {"num_evaluations": 1}},
    "tied": {"untied": {}, "tied": {"tied": True}},
    "memory": {"plain": {}, "recompute": {"recompute": True}, "deallocate": {"deallocate": True}},
    "loss": {"mean": {}, "masked": {"masked": True}, "per-token": PER_TOKEN},
    "shapes": {
        "fixed": {},
        "varying": {"varying_lengths": True},
        "sequence-parallel": {"sequence_parallel": True, "seq": 12},
    },
    "transport": {"sliced": {"transport": "sliced"}, "rank0": {"transport": "rank0"}, "sites": {}},
    "sync": {
        "plain": {},
        "adam": {"optimizer": "adam"},
        "overlapped": {"overlap_grad_reduce": True},
        "unaligned": {"overlap_grad_reduce": True, "align_grad_reduce": False},
        "distributed": OVERLAPPED,
        "bf16": {"optimizer": "adam", "dtype": "bf16"},
    },
}


def grid(lists: list[tuple[int, ...]], max_world: int) -> Iterator[Row]:
    layouts = [(sizes, dp) for sizes, dp in product(lists, (1, 2)) if sum(sizes) * dp <= max_world]
    for layout, *values in product(layouts, *AXES.values()):
        row = {"layout": layout, **dict(zip(AXES, values, strict=True))}
        # Eight steps of a run with its own rounding are no comparison.
        if row["sync"] != "bf16" or row["steps"] != "rampup":
            yield row


def case_of(row: Any) -> Case:
    sizes, dp = row["layout"]
    fields: dict[str, Any] = {}
    for axis, values in AXES.items():
        fields |= values[row[axis]]
    if row["transport"] == "sites":
        fields["sites"] = ("edge",) + ("cloud",) * (len(sizes) - 1)
    return u_shaped(*sizes, dp=dp, **fields)


def contextual(*sizes: int, cp_list: tuple[int, ...], **fields: Any) -> Case:
    return u_shaped(*sizes, cp_list=cp_list, gathered_attention=True, seq=8, **fields)


CASES = [
    u_shaped(1, 2, 2, **RAMPUP),
    u_shaped(1, 2, tied=True, recompute=True, deallocate=True, masked=True),
    # Between sites a sum over the model joins all replicas, whose token counts differ.
    u_shaped(1, 1, tied=True, dp=2, sites=("edge", "cloud"), **OVERLAPPED, **PER_TOKEN),
    u_shaped(1, 2, 2, sequence_parallel=True, seq=6, transport="rank0", num_microbatches=2),
]
FULL_CASES = [
    *(case_of(row) for row in pairwise([*grid(LISTS, MAX_WORLD)][::61])),
    # The ring of five stages, with every number of microbatches; and with sequence parallelism across its wrap-around.
    u_shaped(1, 2, 1, 2, 1, **RAMPUP),
    u_shaped(1, 1, 1, 1, tied=True, overlap_grad_reduce=True, **RAMPUP),
    u_shaped(2, 1, 3, sequence_parallel=True, seq=18, length_step=6, varying_lengths=True, transport="rank0"),
    u_shaped(2, 1, 3, sequence_parallel=True, seq=18, length_step=6, varying_lengths=True),
    u_shaped(1, 2, 2, sequence_parallel=True, seq=6, sites=("edge", "cloud", "cloud"), tied=True),
    # As many microbatches as the edge runs ends before its first BE: 1, 2 and 2 of 2, 3 and 4 stages.
    u_shaped(1, 2, dp=2, overlap_grad_reduce=True, num_microbatches=1),
    u_shaped(1, 2, 2, overlap_grad_reduce=True, num_microbatches=2),
    u_shaped(1, 1, 1, 1, dp=2, overlap_grad_reduce=True, num_microbatches=2, align_grad_reduce=False),
    u_shaped(1, 2, partial_batches=True, varying_lengths=True, num_microbatches=6, **PER_TOKEN),
    u_shaped(1, 2, 2, **DISTRIBUTED, loss_scale=1024.0, inf_at=(2, 1, 1)),
    u_shaped(1, 2, count_zeros=True, has_bias=False, num_microbatches=1, clip=0.05),
    contextual(1, 2, cp_list=(2, 1), tied=True),
    contextual(1, 2, cp_list=(1, 2), sequence_parallel=True, **PER_TOKEN),
    contextual(1, 2, 1, cp_list=(2, 1, 1), **DISTRIBUTED, overlap_grad_reduce=True),
    contextual(1, 1, cp_list=(2, 2), tied=True, recompute=True),
]


@pytest.mark.needs("tied_and_distributed", cases=("1,1 dp=2",))
@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in FULL_CASES)], ids=str
)
def test_equals_the_sequential_model(runs: Runs, saved: Saved, case: Case) -> None:
    run = check_u_shape(runs, saved, case)
    assert_evaluations_repeat_the_losses(run, case.checks.num_evaluations)
    oracle = runs.kept(sequential(case).but(load=saved(case)))
    assert (run.successful, run.num_zeros) == (oracle.successful, oracle.num_zeros)
    assert run.successful == [
        case.checks.inf_at is None or step != case.checks.inf_at[2] for step in range(case.data.num_steps)
    ]


def assert_evaluations_repeat_the_losses(run: Run, num_evaluations: int) -> None:
    for replica, evaluations in zip(run.losses, run.evaluations, strict=True):
        assert evaluations == [losses for losses in replica for _ in range(num_evaluations)]


@pytest.mark.parametrize(
    "case",
    [
        u_shaped(1, 2, num_microbatches=2, num_evaluations=2),
        pytest.param(u_shaped(1, 2, 2, **RAMPUP, num_evaluations=1, collects=True), marks=pytest.mark.full),
        pytest.param(u_shaped(1, 1, dp=2, num_evaluations=1, **OVERLAPPED), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_evaluation_sees_the_losses_of_the_step_and_changes_nothing(runs: Runs, case: Case) -> None:
    """Forward only, before the first step and between the others, once or twice."""
    case = case.but(wants_weights=True)
    run = runs.run(case)
    assert_evaluations_repeat_the_losses(run, case.checks.num_evaluations)
    assert_identical(run, runs.run(case.but(num_evaluations=0, collects=False)))


@pytest.mark.needs("batches_shared_in_core")
def test_both_chunks_of_the_edge_get_whole_batches(pool: Pool) -> None:
    batches = pool.run(3, f"{JOBS}:batch_of_the_edge")
    rows = [[0, 1, 2], [3, 4, 5]]
    keys = ("tokens", "labels", "loss_mask", "position_ids")
    whole = {key: [[n + 10 * i for n in row] for row in rows] for i, key in enumerate(keys)}
    assert batches == [whole, whole, {}]


def test_every_forward_has_its_own_microbatch_and_reads_it_only_then(pool: Pool) -> None:
    """The number that Megatron's layers are told, and what the edge has read so far; the cloud reads nothing."""
    edge, other, cloud = pool.run(3, f"{JOBS}:forwards", {"case": u_shaped(2, 1, num_microbatches=5, num_steps=1)})
    for chunk in (0, 1):
        assert [microbatch for index, microbatch, _ in edge if index == chunk] == list(range(5))
    assert [read for _, _, read in edge] == list(range(10))
    assert [forward[:2] for forward in other] == [forward[:2] for forward in edge]
    assert cloud == [(0, microbatch, 0) for microbatch in range(5)]


def test_start_leaves_torch_alone_and_makes_the_same_groups_on_every_rank(pool: Pool) -> None:
    case = u_shaped(1, 2, dp=2)
    changed, groups = zip(*pool.run(case.world_size, f"{JOBS}:start_a_u", {"case": case}), strict=True)
    assert set(changed) == {()}
    assert all(calls == groups[0] for calls in groups)
    channels = [name for name, _ in groups[0] if name.startswith("boundary ") and not name.endswith("finish")]
    assert len(channels) == 2 * 2 * case.stages.dp  # one per boundary, direction and replica


@pytest.mark.parametrize("case", [u_shaped(1, 2), pytest.param(u_shaped(1, 2, 2, tied=True), marks=pytest.mark.full)])
def test_norms_span_all_stages(runs: Runs, saved: Saved, pool: Pool, case: Case) -> None:
    """The two-norm and the largest gradient, of all ranks, of the edge alone and of the cloud alone."""
    case = case.but(load=saved(case))
    (whole,) = pool.run(1, f"{JOBS}:norms", {"case": sequential(case)})
    ranks = pool.run(case.world_size, f"{JOBS}:norms", {"case": case})
    assert all(norms == ranks[0] for norms in ranks)
    (two, largest), (edge_two, edge_largest), (cloud_two, cloud_largest) = ranks[0]
    assert [two, largest] == pytest.approx(whole[0], rel=1e-5)
    assert two**2 == pytest.approx(edge_two**2 + cloud_two**2, rel=1e-5) and min(edge_two, cloud_two) > 0
    assert largest == max(edge_largest, cloud_largest)


@pytest.mark.full
def test_nodes_of_the_launcher_mean_nothing(pool: Pool, runs: Runs) -> None:
    case = u_shaped(1, 2, num_steps=2)
    ranks = pool.run(3, "tests.multiproc.jobs.core_job:train", {"case": case}, node_sizes=[2, 1])
    assert assemble(case, ranks).losses == runs.run(case).losses


RECORDED = [
    u_shaped(1, 2, num_steps=2),
    u_shaped(1, 1, num_steps=1, num_microbatches=1),
    u_shaped(1, 2, 2, num_steps=2, varying_lengths=True, tied=True),
    u_shaped(1, 2, 2, num_steps=2, transport="rank0", sequence_parallel=True, seq=6, num_evaluations=1),
    u_shaped(1, 1, 1, dp=2, num_steps=2, num_microbatches=2, **OVERLAPPED),
]


@pytest.mark.parametrize("case", defaults_first(RECORDED, 1))
def test_recorded_steps_pass_all_models(pool: Pool, case: Case) -> None:
    traces = Recordings(pool).of(case)
    assert check(traces, MODELS) == ()
    for trace in traces:
        # Every channel was used once before the first compute: what a device creates at first use is there.
        used: dict[object, list[int]] = {}
        first = next(i for i, event in enumerate(trace.events) if event.kind is Kind.MARK)
        for i, event in enumerate(trace.events):
            if event.is_message:
                used.setdefault((event.group, event.peer, event.kind), []).append(i)
        assert all(places[0] < first for places in used.values())
        assert used or (case.execution.transport == "rank0" and trace.rank > 0)  # the leaders alone have channels then


JOB = "tests.multiproc.jobs.variants:draw"
SITES = ("edge", "cloud")


@pytest.fixture
def key(tmp_path: Path) -> str:
    """A file with a key."""
    file = tmp_path / "key"
    file.write_bytes(bytes(range(100, 132)))
    file.chmod(0o600)
    return str(file)


def _case(*sizes: int, dp: int = 1) -> Case:
    return Case.of(sizes=sizes, layers=(1, 2, 1), dp=dp, sites=SITES, tied=True)


def _run(pool: Pool, case: Case, world_size: int, **options: Any) -> list[tuple[int, dict[str, Any], list[str]]]:
    return pool.run(world_size, JOB, {"case": case, **options})


def test_a_script_draws_the_edges_weights_from_the_key(pool: Pool, key: str) -> None:
    """Two replicas of two ranks hold slices of what one rank draws; the cloud draws from the seed."""
    one = _run(pool, _case(1, 1), 2, edge_seed=key)
    wide = _run(pool, _case(2, 1, dp=2), 6, edge_seed=key)
    assert [stage for stage, *_ in wide] == [0, 0, 0, 0, 1, 1]
    for name, (whole, _) in one[0][1].items():
        parts = [weights[name] for _, weights, _ in wide[:4]]
        assert torch.equal(parts[0][0], parts[2][0]) and torch.equal(parts[1][0], parts[3][0]), name
        dim = parts[0][1]
        joined = parts[0][0] if dim is None else torch.cat([parts[0][0], parts[1][0]], dim)
        assert torch.equal(joined, whole), name
    shared, random = (_run(pool, _case(1, 1), 2, edge_seed=seed) for seed in ("shared", None))
    drawn = [name for name, (values, _) in shared[0][1].items() if values.std() > 0]
    assert len(drawn) > 10
    for name in drawn:
        values = [run[0][1][name][0] for run in (one, shared, random)]
        assert not any(torch.equal(values[i], values[j]) for i, j in ((0, 1), (0, 2), (1, 2))), name
    for name, (values, _) in shared[1][1].items():
        assert all(torch.equal(values, run[1][1][name][0]) for run in (one, random)), name
    word, head = (one[0][1][name][0] for name in one[0][1] if name.endswith(("word_embeddings.weight", "layer.weight")))
    assert torch.equal(word, head), "a tied weight was drawn twice"


def test_a_script_that_draws_from_its_own_seed_is_told_so(pool: Pool) -> None:
    case = _case(1, 1).but(num_steps=2)
    for is_told, seed in ((True, None), (False, "shared"), (False, None)):
        runs = _run(pool, case, 2, edge_seed=seed, is_told=is_told, num_steps=2)
        said = [sum("drawing_edge_weights" in line for line in lines) for *_, lines in runs]
        assert said == [0 if is_told or seed == "shared" else 1, 0], (is_told, seed)
