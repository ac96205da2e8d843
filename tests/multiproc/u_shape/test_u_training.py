"""Layerwise disaggregated training with megatron.training: an unmodified script, from a uniform run's checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    grad_norms,
    losses,
    num_ranks,
    uniform,
)
from tests.support.hosts import host_name, is_older

pytestmark = pytest.mark.needs("scripts_here")

U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list"]
# Megatron 0.12 ends a run of another number of stages that does not leave the random states of the checkpoint alone.
ELSEWHERE = ["--no-load-rng"] if host_name() == "0.12" else []
EVALUATION = ["--eval-interval", "1", "--eval-iters", "1", "--split", "80,10,10"]


@pytest.fixture(scope="module")
def sequential(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScriptRun]]:
    """Four steps of one process, the checkpoint of the second one kept."""
    folder = tmp_path_factory.mktemp("sequential")
    saving = ["--save", str(folder), "--save-interval", "2"]
    runs = scripts.train("1", [*EVALUATION, *saving], hooks=["note_progress"])
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder, runs


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ("1,2", "1,1,2"),
        pytest.param("1,2,2", "1,1,1,1", marks=pytest.mark.full),
        pytest.param("2,1,3", "1,1,1,1", marks=pytest.mark.full),
    ],
)
def test_continues_a_sequential_run_and_then_itself(
    scripts: Scripts, sequential: tuple[Path, list[ScriptRun]], tmp_path: Path, sizes: str, layers: str
) -> None:
    folder, reference = sequential
    saving = ["--save", str(tmp_path), "--save-interval", "1", "--tensorboard-dir", str(tmp_path / "tensorboard")]
    command = [*EVALUATION, *U_SHAPE, layers, *ELSEWHERE, "--load", str(folder), *saving]
    runs = scripts.train(sizes, command, hooks=["note_progress"])
    edge_size = int(sizes.split(",")[0])
    assert [run.steps[0].loss is not None for run in runs] == [rank < edge_size for rank in range(len(runs))]
    assert_same_training(runs, reference, first=2)
    assert runs[0].evaluations == pytest.approx(reference[0].evaluations[2:], rel=1e-5)
    assert "lm loss" in runs[0].output
    assert not any("lm loss" in run.output for run in runs[1:])
    # Steps, samples, learning rate and what there is to do are the same everywhere; the edge alone writes the log.
    # Of the validation set, 16 samples before the checkpoint, 16 after it, and 8 at the end, as of the test set.
    assert runs[0].facts["progress"] == (32, 48, reference[0].facts["progress"][2], True, True, True)
    for run in runs[1:]:
        assert run.facts["progress"] == runs[0].facts["progress"]
        assert run.facts["learning_rates"] == runs[0].facts["learning_rates"]
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"lm loss" in events.read_bytes() and b"lm loss validation" in events.read_bytes()

    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    again = scripts.train(sizes, [*EVALUATION, *U_SHAPE, layers, "--load", str(tmp_path)])
    assert_same_training(again, reference, first=3)


@pytest.mark.full
@pytest.mark.parametrize("sizes", ["1,1,1,1", "1,2,1,2"])
def test_four_stages(scripts: Scripts, tmp_path: Path, sizes: str) -> None:
    """Five layers on an edge and three cloud stages."""
    five = ["--num-layers", "5"]
    reference = scripts.train("1", [*five, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    runs = scripts.train(sizes, [*five, *U_SHAPE, "1,1,1,1,1", *ELSEWHERE, "--load", str(tmp_path)])
    assert_same_training(runs, reference, first=2)


SEQUENCE = ["--sequence-parallel"]
OPTIMIZER = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


@pytest.mark.parametrize(
    ("sizes", "layers", "dp", "options"),
    [
        ("1,2", "1,1,2", 2, [*SEQUENCE, *OPTIMIZER]),
        pytest.param("1,2,2", "1,1,1,1", 1, SEQUENCE, marks=pytest.mark.full),
        pytest.param("2,1", "1,1,2", 2, OPTIMIZER, marks=pytest.mark.full),
    ],
)
def test_sharded_sequences_and_optimizer(
    scripts: Scripts,
    sequential: tuple[Path, list[ScriptRun]],
    tmp_path: Path,
    sizes: str,
    layers: str,
    dp: int,
    options: list[str],
) -> None:
    """From the weights of the sequential run, against it; then on from a checkpoint of its own."""
    folder, _ = sequential
    weights = ["--load", str(folder), "--finetune"]
    reference = scripts.train("1", weights, dp=dp)
    command = [*U_SHAPE, layers, *options]
    runs = scripts.train(sizes, [*command, *weights, "--save", str(tmp_path), "--save-interval", "2"], dp=dp)
    assert_same_training(runs, reference)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    again = scripts.train(sizes, [*command, "--load", str(tmp_path)], dp=dp)
    assert_same_training(again, runs, first=2)


@pytest.mark.needs("layouts")
def test_layout_of_megatron_means_the_same(scripts: Scripts, sequential: tuple[Path, list[ScriptRun]]) -> None:
    folder, reference = sequential
    extra = ["--layerwise-disaggregated-training", "--pipeline-model-parallel-layout", "Et|tt|tL"]
    runs = scripts.train("1,1", [*EVALUATION, *extra, "--load", str(folder)])
    assert_same_training(runs, reference, first=2)


def test_sites_keep_their_parts_of_a_checkpoint(scripts: Scripts, tmp_path: Path) -> None:
    """Each site has a folder of its own and resumes from it, though only rank 0 writes Megatron's note about it."""
    folders = {rank: str(tmp_path / ("edge" if rank == 0 else "cloud")) for rank in range(3)}
    command = arguments("1,2", extra=[*U_SHAPE, "1,1,2", "--ckpt-format", "torch"])
    saving = {rank: ["--save", folder] for rank, folder in folders.items()}
    kwargs = {"arguments": [*command, "--save-interval", "2"], "by_rank": saving}
    whole = scripts.finish(3, kwargs)
    for folder in set(folders.values()):
        tracker = Path(folder) / "latest_checkpointed_iteration.txt"
        assert tracker.read_text() == "4"
        tracker.write_text("2")
    loading = {rank: ["--load", folder] for rank, folder in folders.items()}
    runs = scripts.finish(3, {"arguments": command, "by_rank": loading})
    assert losses(runs) == losses(whole)[2:]
    assert grad_norms(runs) == grad_norms(whole)[2:]


def _refuse(scripts: Scripts, extra: list[str], *words: str, sizes: str = "1,2", **kwargs: Any) -> None:
    runs = scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes, extra=extra), **kwargs})
    assert_refused(runs, *words)
    assert not any("initializing torch distributed" in run.output for run in runs), "refused too late"


@pytest.mark.needs("flags_after_0_12", cases=("fine-tuning", "two-layouts", "validation"))
@pytest.mark.parametrize(
    ("extra", "words"),
    [
        pytest.param(["1,1,1,1"], ["--num-layer-list", "4 parts", "3"], id="length"),
        pytest.param(["1,1,1"], ["3 layers", "--num-layers is 4"], id="sum", marks=pytest.mark.full),
        pytest.param(["1,2,x"], ["1,2,x"], id="no-number", marks=pytest.mark.full),
        pytest.param(["1,0,3"], ["1,0,3", "at least 1"], id="stage-without-layers", marks=pytest.mark.full),
        pytest.param(
            ["1,1,2", "--num-virtual-stages-per-pipeline-rank", "2"],
            ["--num-virtual-stages-per-pipeline-rank 2 with --layerwise-disagg"],
            id="interleaved",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["1,1,2", "--reset-attention-mask"], ["--reset-attention-mask with --layerwise-disagg"], id="packed"
        ),
        pytest.param(
            ["1,1,2", "--sft"], ["--micro-batch-size 2 with --sft; "], id="fine-tuning", marks=pytest.mark.full
        ),
        pytest.param(
            ["1,1,2", "--full-validation"],
            ["--full-validation with --vtp-size-list 1,2"],
            id="validation",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["1,1,2", "--pipeline-model-parallel-layout", "Et|t|ttL"],
            ["give one of them"],
            id="two-layouts",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["1,1,2", "--vtp-sites", "edge,cloud", "--vtp-site", "moon"],
            ["--vtp-site moon is none of --vtp-sites edge,cloud"],
            id="unknown-site",
            marks=pytest.mark.full,
        ),
    ],
)
def test_refused(scripts: Scripts, extra: list[str], words: list[str]) -> None:
    _refuse(scripts, [*U_SHAPE, *extra], *words)


def test_layers_without_the_switch_are_refused(scripts: Scripts) -> None:
    _refuse(scripts, ["--num-layer-list", "1,1,2"], "--num-layer-list is for --layerwise-disaggregated-training")


@pytest.mark.full
def test_edge_without_a_cloud_is_refused(scripts: Scripts) -> None:
    _refuse(scripts, [*U_SHAPE, "2,2"], "needs an edge and a cloud", sizes="2")


@pytest.mark.needs("layouts")
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("t|Et|ttL", ["the edge is stage 0", "write E at the start of the first part"]),
        pytest.param("Et|ttL|t", ["L at the end of the last one"], marks=pytest.mark.full),
        pytest.param("Et|t|t|tL", ["4 parts"], marks=pytest.mark.full),
    ],
)
def test_layout_without_an_edge_is_refused(scripts: Scripts, layout: str, words: list[str]) -> None:
    _refuse(scripts, ["--layerwise-disaggregated-training", "--pipeline-model-parallel-layout", layout], *words)


def test_cloud_that_got_rank_0_is_refused(scripts: Scripts) -> None:
    """A launcher that orders the machines by name may put the cloud first."""
    sites = {0: ["--vtp-site", "cloud"], 1: ["--vtp-site", "cloud"], 2: ["--vtp-site", "edge"]}
    words = ["rank 0: stage 0 belongs to site edge, but its rank 0 runs on a machine of site cloud", "--node-rank"]
    _refuse(scripts, [*U_SHAPE, "1,1,2", "--vtp-sites", "edge,cloud"], *words, by_rank=sites)


def test_tokenizer_that_fails_on_the_edge_ends_all_ranks(scripts: Scripts) -> None:
    _refuse(
        scripts, [*U_SHAPE, "1,1,2", "--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", "not-here"], "rank 0: "
    )


def test_folders_that_are_not_shared_are_refused_where_one_checkpoint_is_written(
    scripts: Scripts, tmp_path: Path
) -> None:
    saving = {rank: ["--save", str(tmp_path / ("edge" if rank == 0 else "cloud"))] for rank in range(3)}
    words = [f"--save {tmp_path / 'cloud'} is not the folder of rank 0", "--ckpt-format torch"]
    _refuse(scripts, [*U_SHAPE, "1,1,2", "--save-interval", "2"], *words, by_rank=saving)


@pytest.mark.full
def test_multi_token_prediction(scripts: Scripts, tmp_path: Path) -> None:
    """The edge predicts two tokens: it trains as a sequential run does, and its checkpoint is resumed."""
    predicting = [
        *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
        *("--no-rope-fusion", "--mtp-loss-scaling-factor", "0.5"),
    ]
    predicting += ["--untie-embeddings-and-output-weights"]
    reference = scripts.train("1", [*predicting, "--save", str(tmp_path), "--save-interval", "2"])
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    command = [*predicting, *U_SHAPE, "1,1,2", "--save-interval", "1"]
    runs = scripts.train("1,2", [*command, "--load", str(tmp_path), "--save", str(tmp_path / "u")])
    assert_same_training(runs, reference, first=2)
    assert "mtp_1 loss" in runs[0].output
    (tmp_path / "u" / "latest_checkpointed_iteration.txt").write_text("3")
    assert_same_training(scripts.train("1,2", [*command, "--load", str(tmp_path / "u")]), reference, first=3)


ONE_TWO_ONE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]
ONE_STEP = ["--train-iters", "1"]


def test_the_edge_meets_itself_and_trains_on(scripts: Scripts) -> None:
    """Each of its two chunks has iterators, so the script's provider runs twice."""
    runs = scripts.train("2,1", [*ONE_TWO_ONE, *ONE_STEP], hooks=["meet_while_building"])
    here = [[(rank, 2, 2, [0, 1], [0], 2)] * 2 for rank in range(2)]
    assert [run.facts["met"] for run in runs] == [*here, []]
    assert len(losses(runs)) == 1
    assert_same_training(runs, scripts.train("2,1", [*ONE_TWO_ONE, *ONE_STEP]))


def test_in_a_pipeline_the_world_is_all_ranks(scripts: Scripts) -> None:
    runs = scripts.train("1,2", ONE_STEP, hooks=["meet_while_building"])
    assert {met[1:3] for run in runs for met in run.facts["met"]} == {(3, 3)}


def test_a_group_that_only_the_edge_would_make_is_refused(scripts: Scripts) -> None:
    kwargs = {"arguments": arguments("2,1", extra=[*ONE_TWO_ONE, *ONE_STEP]), "hooks": ["group_while_building"]}
    *edge, cloud = scripts.launch(3, kwargs)
    reason = "a process group made while the script's provider builds its data sets; "
    assert_refused(edge, reason, "make it before")
    # It waits in a collective of Megatron's, which may break before it is told.
    assert cloud.exit_code not in (0, None) and reason in cloud.output, cloud.output[-3000:]


PREDICTING = ["--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.5", "--global-batch-size", "12"]
PREDICTING += ["--position-embedding-type", "rope", "--no-rope-fusion", "--pipeline-model-parallel-layout"]
UNTIED = ["--untie-embeddings-and-output-weights"]


def _case(name: str, sizes: str, layout: str, *extra: str, full: bool = True) -> Any:
    return pytest.param(sizes, layout, list(extra), id=f"{name}-{sizes}", marks=[pytest.mark.full] if full else [])


@pytest.mark.needs("layouts")
@pytest.mark.parametrize(
    ("sizes", "layout", "extra"),
    [
        _case("short", "1,2,1", "Et*4|m|L", *UNTIED, full=False),
        _case("list", "1,2,1,2,1", "Et*2|(t|)*2,m|L", *UNTIED),
        # Adam makes more of rounding on Megatron 0.16.
        _case("list-tied", "2,1,1,2,1", "Et*2|(t|)*2,m|L", "--optimizer", "sgd", "--lr", "1e-1"),
        # Two chunks a stage: the second stage predicts in its second one.
        _case("interleaved", "2,1,2", "Et|(t|)*3,m|L", *UNTIED),
        _case("interleaved-tied", "1,2,1", "Et|(t|)*3,m|L"),
        # From the stage that predicts on, sequences are cut alike.
        _case("sequence", "1,2,2", "Et|(t|)*3,m|L", "--sequence-parallel"),
    ],
)
def test_a_stage_that_predicts(scripts: Scripts, sizes: str, layout: str, extra: list[str]) -> None:
    hooks = ["own_predictions"] if is_older() else []
    runs, wanted = (scripts.train(s, [*PREDICTING, layout, *extra], hooks=hooks) for s in (sizes, uniform(sizes)))
    assert_same_training(runs, wanted)
    if is_older():
        return
    printed = [re.findall(r"mtp_1 loss: (\S+)", group[-1].output) for group in (runs, wanted)]
    assert len(printed[0]) == 4 and len(set(printed[0])) == 4
    assert list(map(float, printed[0])) == pytest.approx(list(map(float, printed[1])), rel=1e-5)
