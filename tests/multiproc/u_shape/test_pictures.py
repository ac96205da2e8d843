"""A GPT that sees pictures, over an edge and a cloud, trains as on one rank; the pictures stay on the edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.multiproc.cases.core_cases import defaults_first
from tests.multiproc.cases.example_runs import STEP, run_example
from tests.multiproc.cases.picture_cases import PictureCase, PictureRun, assemble, assert_trains_alike
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("layouts")

JOBS = "tests.multiproc.jobs.picture_job"


class PictureRuns:
    """Runs cases on a pool; every run on one rank once."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._kept: dict[PictureCase, PictureRun] = {}

    def run(self, case: PictureCase) -> PictureRun:
        return assemble(self._pool.run(case.world_size, f"{JOBS}:train", {"case": case}))

    def oracle(self, case: PictureCase) -> PictureRun:
        alone = case.alone()
        if alone not in self._kept:
            self._kept[alone] = self.run(alone)
        return self._kept[alone]


@pytest.fixture(scope="module")
def picture_runs(pool: Pool) -> PictureRuns:
    return PictureRuns(pool)


def one_ring(
    *sizes: int, language: tuple[int, ...] = (), setup: dict[str, Any] | None = None, **fields: Any
) -> PictureCase:
    """The whole encoder on the edge."""
    layers = language or {2: (1, 2, 1), 3: (1, 1, 1, 1)}[len(sizes)]
    return PictureCase(sizes=sizes, encoder=(3,), language=layers, setup=tuple((setup or {}).items()), **fields)


ONE_RING = [
    one_ring(1, 2, setup={"is_tied": True}, is_evaluated=True),
    one_ring(1, 2, 2, setup={"sequence_parallel": True}),
    one_ring(1, 2, dp=2, num_microbatches=3),
    one_ring(1, 1, num_microbatches=1),
    one_ring(1, 2, 1, num_microbatches=2, transport="rank0"),
    one_ring(2, 3, setup={"sequence_parallel": True, "is_tied": True}),
    one_ring(1, 2, setup={"some_without": True, "recompute": True}, num_microbatches=6),
    one_ring(1, 2, 2, sites=("edge", "cloud", "cloud"), num_microbatches=7),
    one_ring(1, 2, dp=2, setup={"optimizer": "adam", "distributed_optimizer": True}),
    one_ring(1, 2, setup={"is_frozen": True}),
]


def check_case(picture_runs: PictureRuns, case: PictureCase) -> None:
    run, oracle = picture_runs.run(case), picture_runs.oracle(case)
    has_adam = dict(case.setup).get("optimizer") == "adam"
    assert_trains_alike(run, oracle, atol=0.01 * 5 if has_adam else 0.0)
    assert any(rank.num_split > 0 for rank in run.ranks) is case.split_backward
    if case.is_evaluated:
        assert run.evaluations.tolist() == pytest.approx(run.losses.tolist(), rel=1e-6)
    # Every chunk of the edge that needs data reads all; the cloud reads nothing.
    assert [rank.num_read > 0 for rank in run.ranks] == [
        rank < case.sizes[0] * case.dp_sizes[0] for rank in range(case.world_size)
    ]


@pytest.mark.parametrize("case", defaults_first(ONE_RING, 1), ids=str)
def test_with_the_encoder_on_the_edge_it_trains_as_on_one_rank(picture_runs: PictureRuns, case: PictureCase) -> None:
    check_case(picture_runs, case)


def two_rings(
    *sizes: int,
    encoder: tuple[int, ...] = (),
    language: tuple[int, ...] = (),
    setup: dict[str, Any] | None = None,
    **fields: Any,
) -> PictureCase:
    """The encoder's middle layers in the cloud, too."""
    parts = {2: (1, 2, 1), 3: (1, 1, 1, 1)}[len(sizes)]
    return PictureCase(
        sizes=sizes, encoder=encoder or parts, language=language or parts, setup=tuple((setup or {}).items()), **fields
    )


TWO_RINGS = [
    two_rings(1, 2, 2, setup={"sequence_parallel": True, "is_tied": True}, is_evaluated=True),
    two_rings(1, 1, dp_list=(1, 2)),
    two_rings(1, 2, split_backward=True),
    two_rings(1, 2, dp=2, num_microbatches=3, sites=("edge", "cloud")),
    two_rings(1, 2, setup={"some_without": True}, num_microbatches=6),
    two_rings(1, 1, num_microbatches=1),
    two_rings(1, 2, language=(0, 4, 0)),
    two_rings(1, 2, 1, num_microbatches=2, transport="rank0", in_flight=(2, 1, 1)),
    two_rings(2, 3, setup={"sequence_parallel": True}, encoder=(2, 1, 1)),
    two_rings(2, 1, setup={"sequence_parallel": True, "some_without": True, "is_tied": True}, num_microbatches=7),
    two_rings(1, 1, 1, setup={"recompute": True}, in_flight=(1, 1, 1)),
    two_rings(1, 2, dp=2, setup={"optimizer": "adam", "distributed_optimizer": True}),
    two_rings(1, 2, setup={"is_frozen": True}),
    two_rings(1, 2, 1, dp_list=(1, 2, 2), setup={"optimizer": "adam", "distributed_optimizer": True}),
    two_rings(2, 1, dp_list=(1, 3), num_microbatches=6, setup={"some_without": True, "is_tied": True}),
    two_rings(1, 2, dp_list=(2, 1), num_microbatches=3, setup={"is_frozen": True}, sites=("edge", "cloud")),
    two_rings(1, 1, 2, setup={"is_frozen": True, "optimizer": "adam", "distributed_optimizer": True}),
    two_rings(1, 1, 2, setup={"is_frozen": True}, split_backward=True),
    two_rings(2, 1, dp_list=(2, 1), num_microbatches=3, setup={"recompute": True}, split_backward=True),
]


@pytest.mark.needs("two_rings")
@pytest.mark.parametrize("case", defaults_first(TWO_RINGS, 3), ids=str)
def test_with_layers_of_the_encoder_in_the_cloud_it_trains_as_on_one_rank(
    picture_runs: PictureRuns, case: PictureCase
) -> None:
    check_case(picture_runs, case)


@pytest.mark.needs("two_rings", cases=("two",))
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(one_ring(1, 2), id="one ring", marks=pytest.mark.full),
        pytest.param(two_rings(1, 2), id="two rings"),
    ],
)
def test_no_picture_and_no_word_leaves_the_edge(pool: Pool, case: PictureCase) -> None:
    """Watched from outside the plugin: activations and headers cross, and what is planted is found."""
    (forms, found, names), *cloud = pool.run(case.world_size, f"{JOBS}:watch", {"case": case})
    assert found == [] and any(name.startswith("encoder.") for name in names)
    there = [name for _, _, others in cloud for name in others]
    in_cloud = [name for name in there if name.startswith("encoder.")]
    # Layers 1 and 2 of the encoder, if there are two rings.
    assert {name.partition(".layers.")[2][0] for name in in_cloud} == (set("12") if len(case.encoder) > 1 else set())
    assert of_the_edge(there) == []
    # By the sizes of [S, B, H], whole or in one share of two; one number warms a channel up.
    sizes = [18 * 2 * 48, *([6 * 2 * 24] if len(case.encoder) > 1 else [])]
    by_ring = [{f"send float32 {size // share}" for share in (1, 2)} for size in sizes]
    sent = {form for form in forms if form.startswith("send")}
    assert all(sent & activations for activations in by_ring)
    assert sent <= {"send float32 1"}.union(*by_ring), forms
    for leak in ("pictures", "tokens", "labels", "weights"):
        (_, found, _), *_ = pool.run(case.world_size, f"{JOBS}:watch", {"case": case, "leak": leak})
        assert ("send", leak) in found
    _, (_, _, names), *_ = pool.run(case.world_size, f"{JOBS}:watch", {"case": case, "leak": "place"})
    assert of_the_edge(names) == ["patches.weight", "patches.bias"]


def of_the_edge(names: Sequence[str]) -> list[str]:
    """Find what sees pictures or words: it belongs on the edge."""
    return [name for name in names if any(word in name for word in _SEEING)]


_SEEING = ("patches", "places", "projection", "embedding", "output")


@pytest.mark.needs("two_rings")
def test_configurations_that_differ_are_refused_on_all_ranks(pool: Pool) -> None:
    case = two_rings(1, 2)
    lines = pool.run(case.world_size, f"{JOBS}:refusal", {"case": case})
    wanted = (
        "model chunks 0 and 1 have calculate_per_token_loss=False and True; give the encoder and the language model"
    )
    assert all(wanted in line for line in lines), lines


def example(num_ranks: int, words: str) -> list[tuple[str, ...]]:
    """Start the example; return what it prints of each step."""
    return STEP.findall(run_example("examples/edge_pictures/train.py", num_ranks, words))


@pytest.mark.needs("two_rings")
@pytest.mark.full
def test_the_example_prints_the_same_on_one_rank() -> None:
    alone = example(1, "--sizes 1 --encoder 3 --language 4")
    assert [number for number, *_ in alone] == ["1", "2", "3"]
    for encoder in ("3", "1,1,1"):
        found = example(3, f"--sizes 1,2 --encoder {encoder} --language 1,2,1")
        for ours, theirs in zip(found, alone, strict=True):
            assert [*map(float, ours)] == pytest.approx([*map(float, theirs)], rel=1e-5)
