"""The example script on packed samples: every stage reads the lengths, and no sample sees another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.conversations import write_conversations, write_tokenizer
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    grad_norms,
    losses,
    num_ranks,
    uniform,
)

pytestmark = pytest.mark.needs("fine_tuning")

PACKED = ["--dataloader-inter-document-masking", "--position-embedding-type", "rope", "--no-rope-fusion"]
FULL = pytest.mark.full
SHARDED = ["--sequence-parallel", "--use-distributed-optimizer"]
SIX = ["--num-layers", "6"]
ONE_ROW = ["--micro-batch-size", "1"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list"]
LONGER = ["--seq-length", "13", "--max-position-embeddings", "13", "--train-iters", "7", "--save-interval", "2"]


def train_packed(
    scripts: Scripts, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, **options: Any
) -> list[ScriptRun]:
    hooks = ["packed_samples", "note_lengths"]
    return scripts.train(sizes, [*PACKED, *ONE_ROW, *extra], dp=dp, hooks=hooks, **options)


def assert_same_lengths(runs: Sequence[ScriptRun], reference: Sequence[ScriptRun]) -> None:
    """Check that all ranks count the same lengths, those of the uniform run's last steps.

    Megatron counts an evaluation with the step behind it: a run that goes on from a checkpoint misses one.
    """
    found = runs[0].facts["lengths"]
    num_missed = 2 * (len(found) < len(reference[0].facts["lengths"]))  # it asks twice for each step
    assert found[num_missed:] == reference[0].facts["lengths"][num_missed - len(found) :]
    assert all(dict(step)["total_real_tokens_in_batch"] for step in found), found
    assert len({dict(step)["seqlen_squared_sum_in_batch"] for step in found}) > 2, found
    assert all(run.facts["lengths"] == found for run in runs)


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("1,2", [], 1, id="1,2"),
        pytest.param(
            "2,1", ["--sequence-parallel", "--use-distributed-optimizer"], 1, id="2,1", marks=pytest.mark.full
        ),
        pytest.param(
            "1,2,1", [*SIX, "--eval-interval", "2", "--eval-iters", "1"], 1, id="1,2,1", marks=pytest.mark.full
        ),
        pytest.param("1,2", ["--calculate-per-token-loss"], 2, id="1,2-dp-2", marks=FULL),
    ],
)
def test_documents_of_a_row(scripts: Scripts, sizes: str, extra: list[str], dp: int) -> None:
    kept = [word for word in extra if word not in SHARDED]
    reference = train_packed(scripts, uniform(sizes), kept, dp=dp)
    runs = train_packed(scripts, sizes, extra, dp=dp)
    assert_same_training(runs, reference)
    assert_same_lengths(runs, reference)
    if sizes == "1,2" and dp == 1:
        whole = scripts.train(uniform(sizes), [*PACKED[1:], *ONE_ROW], hooks=["packed_samples"])
        assert losses(whole) != pytest.approx(losses(reference), rel=1e-4), "the lengths change nothing"


@pytest.mark.full
def test_positions_start_anew(scripts: Scripts) -> None:
    """At the first token of a document; its tokens still see those before it."""
    anew = ["--reset-position-ids", "--eod-mask-loss"]
    reference = scripts.train("1,1", anew, hooks=["packed_samples"])
    assert_same_training(scripts.train("1,2", anew, hooks=["packed_samples"]), reference)
    counted = scripts.train("1,1", anew[1:], hooks=["packed_samples"])
    assert losses(counted) != pytest.approx(losses(reference), rel=1e-4), "the positions change nothing"


@pytest.mark.full
def test_documents_with_different_numbers_of_replicas(scripts: Scripts) -> None:
    batch = ["--global-batch-size", "16"]
    command = arguments("1,1", extra=[*PACKED, *ONE_ROW, *batch, "--vtp-dp-list", "1,2"])
    runs = scripts.finish(3, {"arguments": command, "hooks": ["packed_samples"]})
    assert_same_training(runs, train_packed(scripts, "1,1", batch))


@pytest.mark.parametrize(
    ("sizes", "layers", "extra", "dp"),
    [
        pytest.param("1,2", "1,1,2", [], 1, id="1,2"),
        pytest.param("1,2,2", "1,1,1,1", [], 1, id="1,2,2", marks=FULL),
        pytest.param("2,1,3", "1,1,1,1", ["--vtp-transport", "sliced"], 1, id="2,1,3", marks=FULL),
        pytest.param("1,2", "1,1,2", ["--overlap-grad-reduce"], 2, id="1,2-dp-2", marks=FULL),
    ],
)
def test_lengths_cross_to_the_cloud(
    scripts: Scripts, tmp_path: Path, sizes: str, layers: str, extra: list[str], dp: int
) -> None:
    """Five steps of a U, evaluations among them, from the checkpoint of a plain run, whose stages all read the data."""
    evaluating = ["--eval-interval", "2", "--eval-iters", "1"]
    reference = train_packed(scripts, "1,1", [*LONGER, *evaluating, "--save", str(tmp_path)], dp=dp)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shape = [*LONGER, *evaluating, *U_SHAPE, layers, *extra, "--load", str(tmp_path)]
    runs = train_packed(scripts, sizes, shape, dp=dp)
    assert_same_training(runs, reference, first=2)
    assert runs[0].evaluations == pytest.approx(reference[-1].evaluations[1:], rel=1e-5)
    assert_same_lengths(runs, reference)


def test_lengths_cross_to_another_site(scripts: Scripts) -> None:
    """The guards between sites change no digit; the cloud has no tokenizer."""
    shape = [*LONGER, "--eval-interval", "3", "--eval-iters", "1", *U_SHAPE, "1,2,1"]
    reference = train_packed(scripts, "1,1", shape)
    sites = ["--vtp-sites", "edge,cloud", "--vtp-edge-seed", "shared", "--vtp-timing"]
    nothing = {1: ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "not-here"]}
    runs = train_packed(scripts, "1,1", [*shape, *sites], by_rank=nothing)
    for read in (losses, grad_norms):
        assert read(runs) == read(reference)
    assert runs[0].evaluations == reference[0].evaluations
    assert_same_lengths(runs, reference)
    # Of each of 8 rows an activation and a gradient cross each way, [13, 1, 64] in fp32, and 14 numbers into the cloud.
    there, back = 8 * (2 * 4 * 13 * 64 + 4 * 14), 8 * 2 * 4 * 13 * 64
    assert f"edge: sent {there:,} bytes, received {back:,} bytes" in runs[0].output


@pytest.mark.parametrize(
    ("sizes", "dp_list", "layers"),
    [
        pytest.param("1,1", "1,2", "1,2,1", id="1,1-dp-1,2", marks=FULL),
        pytest.param("2,1", "1,2", "1,2,1", id="2,1-dp-1,2", marks=FULL),
        pytest.param("1,2", "2,1", "1,1,2", id="1,2-dp-2,1", marks=FULL),
        pytest.param("1,1,2", "1,3,1", "1,1,1,1", id="1,1,2-dp-1,3,1", marks=FULL),
    ],
)
def test_lengths_cross_to_other_numbers_of_replicas(
    scripts: Scripts, tmp_path: Path, sizes: str, dp_list: str, layers: str
) -> None:
    """Of a row that a replica of the cloud has, it gets the lengths, and no other."""
    edge_dp, *_ = replicas = [int(number) for number in dp_list.split(",")]
    batch = [*LONGER, "--global-batch-size", "12"]
    reference = train_packed(scripts, "1,1", [*batch, "--save", str(tmp_path)], dp=edge_dp)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    shape = [*batch, *U_SHAPE, layers, "--vtp-dp-list", dp_list, "--load", str(tmp_path)]
    command = arguments(sizes, extra=[*PACKED, *ONE_ROW, *shape])
    world_size = sum(int(size) * number for size, number in zip(sizes.split(","), replicas, strict=True))
    hooks = ["packed_samples", "note_lengths"]
    runs = scripts.finish(world_size, {"arguments": command, "hooks": hooks})
    assert_same_training(runs, reference, first=2)
    assert_same_lengths(runs, reference)


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        pytest.param("1,2", [], id="1,2", marks=FULL),
        pytest.param("2,1,2", ["--num-layers", "3", *SHARDED], id="2,1,2", marks=FULL),
        pytest.param("1,2", [*U_SHAPE, "1,1,2"], id="U-1,2"),
        pytest.param("1,2,2", [*U_SHAPE, "1,1,1,1"], id="U-1,2,2", marks=FULL),
        pytest.param("1,1", [*U_SHAPE, "1,2,1", "--vtp-dp-list", "1,2"], id="U-1,1-dp-1,2", marks=FULL),
        pytest.param("1,2", [*U_SHAPE, "1,1,2", "--vtp-dp-list", "1,2"], id="U-1,2-dp-1,2", marks=FULL),
    ],
)
def test_conversations(scripts: Scripts, tmp_path: Path, sizes: str, extra: list[str]) -> None:
    """Megatron's own data set for fine-tuning: several conversations in a row, and losses of the answers only.

    In the U, whose cloud has neither tokenizer nor conversations, from the second step of the plain run on.
    """
    pytest.importorskip("datasets", reason="Megatron reads conversations with it")
    pytest.importorskip("transformers", reason="Megatron's tokenizer for conversations needs it")
    tuned = [
        *("--sft", "--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(write_tokenizer(tmp_path / "letters"))),
        *("--data-path", str(write_conversations(tmp_path / "rows.jsonl")), "--split", "100,0,0"),
        *("--data-cache-path", str(tmp_path / "cache"), "--calculate-per-token-loss"),
        *("--seq-length", "96", "--max-position-embeddings", "96", *PACKED[1:], *ONE_ROW),
    ]

    def tune(sizes: str, extra: Sequence[str], by_rank: Mapping[int, Sequence[str]] | None = None) -> list[ScriptRun]:
        command = [word for word in arguments(sizes, extra=[*tuned, *extra]) if word != "--mock-data"]
        kwargs = {"arguments": command, "by_rank": by_rank, "hooks": ["packed_samples", "own_cache"]}
        return scripts.finish(num_ranks(sizes) if by_rank is None else 1 + len(by_rank), kwargs)

    if extra[:2] != U_SHAPE:
        reference = tune(uniform(sizes), extra[:2])
        assert_same_training(tune(sizes, extra), reference)
        return
    steps = ["--train-iters", "6", "--save-interval", "1"]
    reference = tune("1,1", [*steps, "--save", str(tmp_path / "saved")])
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("1")
    nothing = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "not-here", "--data-path", "not-here"]
    num_copies = 2 if "--vtp-dp-list" in extra else 1  # of the cloud; the edge is rank 0
    cloud = dict.fromkeys(range(1, 1 + num_copies * (num_ranks(sizes) - 1)), nothing)
    runs = tune(sizes, [*steps, *extra, "--load", str(tmp_path / "saved")], cloud)
    assert_same_training(runs, reference, first=1)
