"""A vision encoder and a GPT on grids of their own train as the same model does on one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.multiproc.cases.core_cases import defaults_first
from tests.multiproc.cases.mimo_cases import MimoCase, MimoRuns, Sizes, assert_trains_alike, gradient_distance
from tests.ordering.check import check
from tests.ordering.models import MODELS
from tests.ordering.trace import parse_trace
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("bridges")


def staged(*tp: int, cp: int = 1, dp: int = 1, sequence_parallel: bool = False) -> Sizes:
    """Stages that differ in their tensor-parallel size only."""
    return Sizes(stages=tuple((size, cp, dp) for size in tp), sequence_parallel=sequence_parallel)


@pytest.fixture(scope="module")
def mimo_runs(pool: Pool) -> MimoRuns:
    return MimoRuns(pool)


SIX_EACH = ((1,) * 6, (2,) * 6, (1,) * 6)
FOUR = ((0, 1, 2, 1), (0, 0, 0, 0), (2, 0, 0, 1), (1, 2, 1, 1))

# The first ones run by default. Samples have none, one or two pictures; one microbatch has words only.
CASES = [
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=3)),
    MimoCase(vision=Sizes(dp=2), language=Sizes(cp=2, pp=2), overlap=True),
    MimoCase(vision=Sizes(tp=2, sequence_parallel=True), language=Sizes(tp=2, cp=2, sequence_parallel=True)),
    MimoCase(vision=Sizes(cp=2), language=Sizes(tp=2, pp=2), is_frozen=True),
    MimoCase(vision=Sizes(tp=3), language=Sizes(tp=4)),
    MimoCase(vision=Sizes(), language=Sizes()),
    MimoCase(vision=Sizes(), language=Sizes(), clip=0.0),
    MimoCase(vision=Sizes(dp=3), language=Sizes(dp=2)),
    MimoCase(vision=Sizes(dp=3), language=Sizes(tp=2, dp=2), optimizer="adam", distributed_optimizer=True),
    MimoCase(vision=Sizes(dp=4), language=Sizes(dp=2), pictures=FOUR),
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=4), pictures=FOUR, optimizer="adam", distributed_optimizer=True),
    MimoCase(vision=Sizes(dp=4), language=Sizes(tp=4), pictures=FOUR),
    MimoCase(vision=Sizes(dp=6), language=Sizes(pp=2)),
    MimoCase(vision=Sizes(tp=2, dp=2), language=Sizes(tp=2, dp=2)),
    MimoCase(vision=Sizes(tp=2, dp=2), language=Sizes(cp=2, dp=2)),
    MimoCase(vision=Sizes(tp=2), language=Sizes(cp=2, dp=3)),
    MimoCase(vision=Sizes(dp=2), language=Sizes(cp=2, dp=3), overlap=True),
    MimoCase(vision=Sizes(cp=2, dp=2), language=Sizes(cp=4)),
    MimoCase(vision=Sizes(cp=2), language=Sizes(dp=6)),
    MimoCase(vision=Sizes(tp=2, cp=2, sequence_parallel=True), language=Sizes(tp=2, dp=2, sequence_parallel=True)),
    MimoCase(vision=Sizes(tp=4), language=Sizes(pp=4)),
    MimoCase(vision=Sizes(dp=3), language=Sizes(pp=4)),
    MimoCase(vision=Sizes(dp=2), language=Sizes(tp=2, pp=2, sequence_parallel=True)),
    MimoCase(vision=Sizes(dp=3), language=Sizes(pp=2, dp=2), is_frozen=True),
    MimoCase(vision=Sizes(dp=2), language=Sizes(cp=2, pp=4)),
    MimoCase(vision=Sizes(tp=3, dp=2), language=Sizes(tp=2, dp=3)),
    MimoCase(vision=Sizes(tp=2, dp=3), language=Sizes(tp=3, dp=2)),
    MimoCase(vision=Sizes(tp=2, sequence_parallel=True), language=Sizes(tp=2, cp=2, pp=2, sequence_parallel=True)),
]


@pytest.mark.parametrize("case", defaults_first(CASES, 3), ids=str)
def test_trains_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    oracle = mimo_runs.oracle(case)
    assert_trains_alike(mimo_runs.run(case), oracle, has_gradients=not case.distributed_optimizer)


def test_averages_over_different_numbers_of_replicas_are_refused_on_all_ranks(pool: Pool) -> None:
    case = MimoCase(vision=Sizes(dp=2), language=Sizes(tp=2))
    answers = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:average", {"case": case})
    line = (
        "the gradients of module 'vision' would be divided by 2, those of the language model, which has the loss, by 1"
    )
    assert all(line in answer for answer in answers), answers
    # What counts is the stage with the loss, the last one.
    case = MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 1, 1), (1, 1, 2))))
    answers = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:average", {"case": case})
    line = "of module 'language' would be divided by 1, those of the language model, which has the loss, by 2"
    assert all(line in answer for answer in answers), answers
    equal = MimoCase(vision=Sizes(dp=2), language=Sizes(cp=2))
    assert pool.run(equal.world_size, "tests.multiproc.jobs.mimo_job:average", {"case": equal}) == ["nothing"] * 4


# Other microbatches have no clips than have no pictures.
CLIPS = ((1, 0, 0, 2, 0, 1), (0, 1, 0, 1, 2, 0), (0,) * 6, (1, 0, 2, 0, 1, 1))
ENCODERS = [
    MimoCase(vision=Sizes(dp=2), sound=Sizes(tp=2), language=Sizes(dp=3), clips=CLIPS),
    MimoCase(vision=Sizes(dp=3), sound=Sizes(), language=Sizes(cp=2, pp=2), clips=CLIPS, overlap=True),
    MimoCase(vision=Sizes(tp=2), sound=Sizes(dp=2), language=staged(1, 2), clips=CLIPS),
]


@pytest.mark.parametrize("case", defaults_first(ENCODERS, 1), ids=str)
def test_two_encoders_train_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    assert_trains_alike(mimo_runs.run(case), mimo_runs.oracle(case))


ORDERED = [
    MimoCase(vision=Sizes(dp=2), sound=Sizes(tp=2), language=staged(1, 2), clips=CLIPS),
    MimoCase(
        vision=Sizes(dp=2), sound=Sizes(), language=staged(1, 2), clips=CLIPS, is_planned=True, in_flight=(4, 3, 2, 1)
    ),
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=3, pp=2)),
    MimoCase(vision=Sizes(dp=3), language=Sizes(stages=((1, 1, 2), (2, 1, 1)))),
    MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 1, 2), (1, 2, 1), (1, 1, 3))), is_planned=True),
]


@pytest.mark.parametrize("case", defaults_first(ORDERED, 1), ids=str)
def test_bridges_of_encoders_and_a_pipeline_together_pass_all_models(pool: Pool, case: MimoCase) -> None:
    texts = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:record", {"case": case})
    traces = [parse_trace(text) for text in texts]
    assert all(any(event.is_message for event in trace.events) for trace in traces)
    assert check(traces, MODELS) == ()


def test_no_picture_and_no_weight_leaves_the_encoders(pool: Pool) -> None:
    """Watched from outside the plugin; what is planted is found."""
    case = MimoCase(vision=Sizes(dp=2), sound=Sizes(), language=Sizes(tp=2), clips=CLIPS)
    for leak in ("", "picture", "weight"):
        kwargs = {"case": case, "leak": leak}
        results = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:watch_pictures", kwargs)
        assert [number > 0 for number, _ in results] == [True] * 3 + [False] * 2
        assert [found for _, found in results] == [["send"] if leak and rank == 0 else [] for rank in range(5)]


# Megatron 0.19 reads a plain float32 optimizer of a MIMO model back without its parameter groups.
RESUMED = [
    MimoCase(
        vision=Sizes(dp=2),
        sound=Sizes(tp=2),
        language=Sizes(dp=3),
        clips=CLIPS,
        optimizer="adam",
        distributed_optimizer=True,
    ),
    MimoCase(vision=Sizes(dp=3), language=Sizes(tp=2, dp=2), optimizer="adam", distributed_optimizer=True),
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=2), optimizer="adam", distributed_optimizer=True, bf16=True),
    MimoCase(
        vision=Sizes(dp=3), language=Sizes(stages=((1, 1, 2), (1, 2, 1))), optimizer="adam", distributed_optimizer=True
    ),
]


@pytest.mark.parametrize("case", defaults_first(RESUMED, 1), ids=str)
def test_a_checkpoint_continues_exactly(pool: Pool, tmp_path: Path, case: MimoCase) -> None:
    kwargs = {"case": case, "path": str(tmp_path)}
    problems = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:resume", kwargs)
    assert [problem for rank in problems for problem in rank] == []


BF16 = [
    MimoCase(vision=Sizes(dp=2), language=Sizes(tp=2), bf16=True),
    MimoCase(vision=Sizes(tp=2), sound=Sizes(dp=2), language=Sizes(pp=2), clips=CLIPS, bf16=True),
]


@pytest.mark.parametrize("case", defaults_first(BF16, 1), ids=str)
def test_bf16_trains_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    """To rounding: both differ from float32 by ten times as much as from each other, and by as much as the other."""
    run, oracle, exact = (mimo_runs.run(case), mimo_runs.oracle(case), mimo_runs.oracle(replace(case, bf16=False)))
    # Weights may differ by two roundings of 16 bits, which have 8 of precision.
    assert_trains_alike(run, oracle, rel=1e-2, has_gradients=False)
    np.testing.assert_allclose(run.norms, oracle.norms, rtol=3e-3)
    ours, theirs = (gradient_distance(one, exact) for one in (run, oracle))
    assert theirs > 1e-3 and ours < 1.2 * theirs, (ours, theirs)


STAGES = [
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2)),
    MimoCase(vision=Sizes(dp=4), language=staged(1, 4, 4), pictures=FOUR),
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2, 2)),
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2, 2, 1, sequence_parallel=True)),
    MimoCase(vision=Sizes(dp=3), language=staged(2, 1, dp=2)),
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2, cp=2)),
    MimoCase(vision=Sizes(tp=2, sequence_parallel=True), language=staged(2, 4, sequence_parallel=True)),
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2, dp=3), optimizer="adam", distributed_optimizer=True),
    MimoCase(vision=Sizes(dp=2), language=staged(3, 2), is_frozen=True, overlap=True),
    MimoCase(vision=Sizes(dp=2), language=staged(4, 4, 1, 1)),
]


@pytest.mark.parametrize("case", defaults_first(STAGES, 1), ids=str)
def test_stages_of_different_sizes_train_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    oracle = mimo_runs.oracle(case)
    assert_trains_alike(mimo_runs.run(case), oracle, has_gradients=not case.distributed_optimizer)


# Here the batch, or the sequence, is cut anew between the stages.
REPLICAS = [
    MimoCase(vision=Sizes(dp=3), language=Sizes(stages=((1, 1, 2), (2, 1, 1)))),
    MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 1, 2), (1, 2, 1), (1, 1, 3))), is_planned=True),
    MimoCase(vision=Sizes(), language=Sizes(stages=((1, 1, 1), (1, 2, 1)))),
    MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 1, 2), (1, 1, 3))), overlap=True),
    MimoCase(
        vision=Sizes(dp=2),
        language=Sizes(stages=((1, 1, 1), (2, 1, 3), (1, 1, 2))),
        optimizer="adam",
        distributed_optimizer=True,
    ),
    MimoCase(vision=Sizes(tp=2), language=Sizes(stages=((2, 1, 1), (2, 2, 2)), sequence_parallel=True)),
    MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 2, 1), (2, 1, 2))), counts_in_megatron=True),
    MimoCase(vision=Sizes(dp=2), language=Sizes(stages=((1, 1, 3), (1, 1, 1), (1, 1, 2))), clip=0.0),
    MimoCase(
        vision=Sizes(dp=2),
        sound=Sizes(tp=2),
        language=Sizes(stages=((1, 1, 1), (2, 1, 2))),
        clips=CLIPS,
        is_planned=True,
        in_flight=(4, 3, 2, 1),
    ),
    MimoCase(vision=Sizes(dp=4), language=Sizes(stages=((1, 1, 4), (4, 1, 1))), pictures=FOUR, is_frozen=True),
]


@pytest.mark.parametrize("case", defaults_first(REPLICAS, 1), ids=str)
def test_stages_with_different_numbers_of_replicas_train_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    oracle = mimo_runs.oracle(case)
    assert_trains_alike(mimo_runs.run(case), oracle, has_gradients=not case.distributed_optimizer)


PLANNED = [
    MimoCase(vision=Sizes(dp=2), sound=Sizes(tp=2), language=staged(1, 2), clips=CLIPS, is_planned=True),
    MimoCase(
        vision=Sizes(dp=2),
        language=Sizes(dp=3),
        pictures=((1,) * 6, (1,) * 6, (1,) * 6, (1,) * 6),
        is_planned=True,
        has_fixed_shape=True,
        in_flight=(4, 1),
    ),
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=3, pp=2), is_planned=True, in_flight=(4, 2, 1), overlap=True),
    MimoCase(vision=Sizes(dp=3), language=Sizes(), is_planned=True, in_flight=(9,)),
    MimoCase(vision=Sizes(tp=2), language=Sizes(cp=2, pp=2), is_planned=True, is_frozen=True),
    MimoCase(vision=Sizes(dp=2), language=staged(1, 2, 2), is_planned=True, in_flight=(4, 3, 2, 1)),
    MimoCase(
        vision=Sizes(dp=4),
        language=staged(1, 4, 4),
        pictures=FOUR,
        is_planned=True,
        optimizer="adam",
        distributed_optimizer=True,
    ),
    MimoCase(
        vision=Sizes(tp=2, sequence_parallel=True), language=Sizes(tp=2, pp=2, sequence_parallel=True), is_planned=True
    ),
    MimoCase(vision=Sizes(dp=3), sound=Sizes(), language=Sizes(cp=2, pp=2), clips=CLIPS, is_planned=True),
]


@pytest.mark.parametrize("case", defaults_first(PLANNED, 1), ids=str)
def test_planned_orders_train_as_on_one_rank(mimo_runs: MimoRuns, case: MimoCase) -> None:
    oracle = mimo_runs.oracle(case)
    assert_trains_alike(mimo_runs.run(case), oracle, has_gradients=not case.distributed_optimizer)


def test_a_planned_evaluation_gives_the_losses_of_megatrons(pool: Pool) -> None:
    """In training the encoder runs four forwards before it waits; in Megatron's order two."""
    planned = MimoCase(vision=Sizes(dp=2), language=Sizes(pp=2), is_planned=True, in_flight=(4, 2, 1))
    job = "tests.multiproc.jobs.mimo_job:evaluate"
    ours = pool.run(planned.world_size, job, {"case": planned})
    theirs = pool.run(planned.world_size, job, {"case": replace(planned, is_planned=False, in_flight=None)})
    assert [losses for losses, _ in ours] == [losses for losses, _ in theirs]
    before, after = ours[-1][0]
    assert before != after, "it trains nothing"
    for _, order in ours:
        first, _, _ = order.partition("0WAIT_RECV_B0")
        assert [word for word in first.split() if "F" in word and "_" not in word] == ["0F0", "0F1", "0F2", "0F3"]


@pytest.mark.parametrize(
    ("topology", "is_fixed", "line"),
    [
        ({"vision": [], "language": []}, False, "the modules vision, language feed no other"),
        ({"vision": ["language", "sound"], "language": []}, False, "module 'vision' feeds language, sound"),
        (None, True, "variable_seq_lengths=False; modules have tensors of different shapes"),
    ],
)
def test_what_no_planned_order_fits_is_refused_on_all_ranks(
    pool: Pool, topology: dict[str, list[str]] | None, is_fixed: bool, line: str
) -> None:
    case = MimoCase(vision=Sizes(dp=2), language=Sizes(), is_planned=True)
    kwargs = {"case": case, "topology": topology, "is_fixed": is_fixed}
    answers = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:refused", kwargs)
    assert all(line in answer for answer in answers), answers


def test_megatron_counts_the_tokens_of_stages_of_different_sizes(mimo_runs: MimoRuns) -> None:
    """It broadcasts them along a pipeline group, which has no rank in common for all."""
    case = MimoCase(vision=Sizes(dp=2), language=staged(1, 2, dp=3), counts_in_megatron=True)
    assert_trains_alike(mimo_runs.run(case), mimo_runs.oracle(case))


def test_a_shared_embedding_is_refused_between_stages_of_different_sizes(pool: Pool) -> None:
    case = MimoCase(vision=Sizes(), language=staged(1, 2))
    first, *others = pool.run(case.world_size, "tests.multiproc.jobs.mimo_job:tie", {"case": case})
    assert first == "built"
    assert all("stages of tp 1,2 hold different slices" in one for one in others)


def test_nothing_comes_back_to_a_frozen_encoder(mimo_runs: MimoRuns, tmp_path: Path) -> None:
    messages = {}
    for is_frozen in (False, True):
        path = tmp_path / str(is_frozen)
        case = MimoCase(vision=Sizes(dp=2), language=Sizes(tp=2), is_frozen=is_frozen, audit=str(path))
        assert_trains_alike(mimo_runs.run(case), mimo_runs.oracle(case))
        found = [file.read_text() for file in tmp_path.iterdir() if file.name.startswith(str(is_frozen))]
        assert len(found) == case.world_size
        messages[is_frozen] = {kind: sum(text.count(kind) for text in found) for kind in ("activation", "gradient")}
    assert messages[True]["gradient"] == 0 < messages[False]["gradient"], messages
    assert messages[True]["activation"] == messages[False]["activation"] > 0


STOCK = [
    MimoCase(vision=Sizes(dp=2), language=Sizes(dp=2), pictures=SIX_EACH, is_stock=True),
    MimoCase(vision=Sizes(tp=2), language=Sizes(dp=2), pictures=SIX_EACH, is_stock=True),
]


@pytest.mark.full
@pytest.mark.parametrize("case", STOCK, ids=str)
def test_trains_as_with_megatrons_bridge(mimo_runs: MimoRuns, case: MimoCase) -> None:
    """What Megatron's bridge can do it does as ours, which says that the model and its sums are Megatron's use."""
    assert_trains_alike(mimo_runs.run(case), mimo_runs.oracle(case))
    assert_trains_alike(mimo_runs.run(replace(case, is_stock=False)), mimo_runs.oracle(case))
