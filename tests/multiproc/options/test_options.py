"""Options that the table calls supported, and that no other test turns on: unequal lists train as the uniform ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    MODEL,
    ScriptRun,
    arguments,
    assert_refused,
    assert_same_training,
    launch,
    train,
    uniform,
)
from tests.support.hosts import host_name, is_older
from tests.support.lines import warnings
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


@pytest.fixture(scope="module")
def equal_stages(script_pool: Pool) -> list[ScriptRun]:
    """Train Megatron's own stages of two ranks each."""
    return train(script_pool, "2,2")


@pytest.fixture(scope="module")
def single_ranks(script_pool: Pool) -> list[ScriptRun]:
    """Train two stages of one rank."""
    return train(script_pool, "1,1")


INTERLEAVED_3 = ["--num-virtual-stages-per-pipeline-rank", "2", "--num-layers", "6", "--global-batch-size", "12"]
OVERLAPPED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
INTERLEAVED_2 = ["--num-virtual-stages-per-pipeline-rank", "2"]
_SHAPE = ("--seq-length", "--micro-batch-size", "--hidden-size")


def _block(*, heads_in_group: int | None, ffn_mult: float | None, has_linear: bool = False) -> dict[str, Any]:
    attention = {"no_op": heads_in_group is None and not has_linear, "n_heads_in_group": heads_in_group}
    mlp = {"no_op": ffn_mult is None and not has_linear, "ffn_mult": ffn_mult}
    return {
        "attention": {**attention, "replace_with_linear": has_linear},
        "ffn": {**mlp, "replace_with_linear": has_linear},
    }


# Layers of two widths, one without attention, one of plain matrices.
_HETEROGENEOUS = {
    **{"hidden_size": 64, "num_attention_heads": 12, "num_hidden_layers": 4, "hidden_act": "silu", "rope_theta": 10000},
    **{"rope_scaling": {"factor": 8.0}, "tie_word_embeddings": False},
    "block_configs": [
        _block(heads_in_group=6, ffn_mult=1.5),
        _block(heads_in_group=None, ffn_mult=3.0),
        _block(heads_in_group=6, ffn_mult=None),
        _block(heads_in_group=None, ffn_mult=None, has_linear=True),
    ],
}
_OF_A_FILE = [
    *("--position-embedding-type", "rope", "--use-rotary-position-embeddings", "--no-rope-fusion"),
    *("--use-rope-scaling", "--rope-scaling-factor", "8.0", "--swiglu", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--group-query-attention", "--num-query-groups", "2"),
    "--untie-embeddings-and-output-weights",
]


def _case(name: str, sizes: str, *extra: str, dp: int = 1, full: bool = True) -> Any:
    return pytest.param(sizes, list(extra), dp, id=f"{name}-{sizes}", marks=[pytest.mark.full] if full else [])


@pytest.mark.needs("layouts", cases=("layout",))
@pytest.mark.needs("stock_without_overlap", cases=("gather-in-step-1,2", "unaligned-1,2", "warmup-flush-2,1,1"))
@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        _case(
            "observed",
            "1,2",
            *("--log-params-norm", "--timing-log-level", "2", "--rerun-mode", "validate_results", "--eod-mask-loss"),
            *("--check-weight-hash-across-dp-replicas-interval", "2"),
            full=False,
        ),
        _case(
            "uneven-layers",
            "1,2,1",
            "--decoder-first-pipeline-num-layers",
            "1",
            "--decoder-last-pipeline-num-layers",
            "2",
        ),
        _case("layout", "2,1", "--pipeline-model-parallel-layout", "Et|tttL"),
        _case(
            "accounted-ends",
            "1,2,1",
            *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
        ),
        _case("group-size", "2,1,1", *INTERLEAVED_3, "--microbatch-group-size-per-virtual-pipeline-stage", "3"),
        _case("warmup-flush", "2,1,1", *INTERLEAVED_3, "--overlap-p2p-communication-warmup-flush"),
        _case(
            "unaligned", "1,2", *INTERLEAVED_2, *OVERLAPPED, "--no-align-grad-reduce", "--no-align-param-gather", dp=2
        ),
        _case(
            "gather-in-step",
            "1,2",
            *INTERLEAVED_2,
            *OVERLAPPED,
            *("--overlap-param-gather-with-optimizer-step", "--ckpt-format", "torch"),
            dp=2,
        ),
        _case("selective-recompute", "1,2", "--recompute-granularity", "selective"),
    ],
)
def test_supported_option(pool: Pool, sizes: str, extra: list[str], dp: int) -> None:
    assert_same_training(train(pool, sizes, extra, dp=dp), train(pool, uniform(sizes), extra, dp=dp))


@pytest.mark.needs("ranks_beyond_groups_of_heads", cases=("4,1",))
@pytest.mark.full
@pytest.mark.parametrize(("sizes", "extra"), [("1,2", []), ("4,1", ["--sequence-parallel"])])
def test_layers_of_a_file(pool: Pool, tmp_path: Path, sizes: str, extra: list[str]) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(_HETEROGENEOUS))
    options = [*_OF_A_FILE, "--heterogeneous-layers-config-path", str(path), "--train-iters", "5"]
    reference = train(pool, uniform(sizes), options)
    assert_same_training(train(pool, sizes, [*options, *extra]), reference)
    with pytest.raises(AssertionError):
        assert_same_training(train(pool, uniform(sizes), [*_OF_A_FILE, "--train-iters", "5"]), reference)


@pytest.mark.full
def test_layers_that_are_ignored(pool: Pool) -> None:
    """Megatron takes no layers from a text alone, neither on one size nor on several, and a run says so."""
    text = json.dumps(_HETEROGENEOUS)
    alone = train(pool, "1,2", [*_OF_A_FILE, "--heterogeneous-layers-config-encoded-json", text])
    assert_same_training(alone, train(pool, "1,1", _OF_A_FILE))
    (line,) = [line for run in alone for line in warnings(run.output)]
    assert line.startswith("--heterogeneous-layers-config-encoded-json without a path with --vtp-size-list 1,2; ")
    assert line.endswith("; give --heterogeneous-layers-config-path")


@pytest.mark.full
def test_layers_of_a_file_that_a_stage_cannot_cut(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(_HETEROGENEOUS))
    options = [*_OF_A_FILE, "--heterogeneous-layers-config-path", str(path)]
    runs = launch(pool, 4, {"arguments": arguments("1,3", extra=options)})
    assert_refused(runs, "layer 1: feed-forward size 256; a stage has TP 3, which does not divide it")


@pytest.mark.full
def test_dropout_repeats_itself(pool: Pool) -> None:
    """Masks depend on the sizes, so a run with dropout is compared with itself."""
    extra = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
    first, second = (train(pool, "1,2", extra) for _ in range(2))
    assert_same_training(first, second, tolerance=0.0)
    with pytest.raises(AssertionError):
        assert_same_training(first, train(pool, "1,2"))


@pytest.mark.full
@pytest.mark.parametrize(("sizes", "extra"), [("1,2", []), ("3,1", ["--sequence-parallel"])])
def test_masks_of_the_data_set(pool: Pool, sizes: str, extra: list[str]) -> None:
    """With this flag no token sees an earlier document of its row: the data set makes the masks."""
    anew = ["--reset-attention-mask"]
    reference = train(pool, uniform(sizes), anew, hooks=["short_documents"])
    assert_same_training(train(pool, sizes, [*anew, *extra], hooks=["short_documents"]), reference)
    with pytest.raises(AssertionError):
        assert_same_training(train(pool, uniform(sizes), hooks=["short_documents"]), reference)


@pytest.mark.full
@pytest.mark.needs("detector_of_0_19")
def test_stragglers(pool: Pool, single_ranks: list[ScriptRun]) -> None:
    """Rank 0 compares the times of all ranks, in every step."""
    watched = ["--log-straggler", "--straggler-minmax-count", "2"]
    runs = train(pool, "1,2", watched, hooks=["time_stragglers"])
    assert_same_training(runs, single_ranks)
    assert [run.facts["stragglers"] for run in runs] == [[[0, 1, 2]] * 4, [], []]


@pytest.mark.full
@pytest.mark.skipif(not find_spec("emerging_optimizers"), reason="needs pip install emerging-optimizers")
@pytest.mark.parametrize("sizes", ["1,2", "2,1"])
def test_lion(pool: Pool, sizes: str) -> None:
    """Its steps are signs: a sign that rounding turns moves a weight by twice the learning rate, so that is small."""
    lion = ["--optimizer", "lion", "--lr", "1e-4", "--min-lr", "1e-5"]
    assert_same_training(train(pool, sizes, lion), train(pool, uniform(sizes), lion))


_INJECTION = ["--rerun-mode", "validate_results", "--error-injection-rate", "2", "--error-injection-type"]


@pytest.mark.parametrize("sizes", ["1,2", pytest.param("2,1", marks=pytest.mark.full)])
def test_a_step_is_repeated(pool: Pool, single_ranks: list[ScriptRun], sizes: str, tmp_path: Path) -> None:
    """After an error that is made up in it, a step on stages of different sizes runs again, with the same result."""
    # Older Megatrons save before they end, also where nobody has said into which folder.
    saving = ["--save", str(tmp_path), "--save-interval", "100"] if is_older() else []
    extra = [*_INJECTION, "transient_error", "--vtp-transport", "sliced", *saving]
    runs = launch(pool, 3, {"arguments": arguments(sizes, extra=extra)})
    assert "boundary 0->1: sliced (asked for)" in runs[0].output
    # Megatron's code for a result that could not be confirmed. It compares as if the second result were another.
    assert {run.exit_code for run in runs} == {17}, [run.output[-3000:] for run in runs]
    found = [re.findall(r"First rerun: .*\((\S+) != (\S+)\)", run.output) for run in runs]
    assert any(found) and all(first == second for pairs in found for first, second in pairs)
    if host_name() == "0.12":
        return  # it ends in the first step already
    whole = [replace(run, steps=run.steps[: len(runs[0].steps)]) for run in single_ranks]
    assert_same_training(runs, whole)


@pytest.mark.needs("iteration_0")
@pytest.mark.full
def test_a_step_is_repeated_from_its_checkpoint(pool: Pool, single_ranks: list[ScriptRun], tmp_path: Path) -> None:
    """An error that occurs again makes the run save and end; resumed, it goes on as if there had been none."""
    saving = ["--save", str(tmp_path), "--save-interval", "100"]
    extra = [*_INJECTION, "correct_result", *saving]
    runs = launch(pool, 3, {"arguments": arguments("1,2", extra=extra)})
    # Megatron's code for a run that is to be resumed.
    assert {run.exit_code for run in runs} == {16}, [run.output[-3000:] for run in runs]
    num_steps = len(runs[0].steps)
    # Without this, Megatron wants to be started on another device first.
    resumed = train(pool, "1,2", ["--load", str(tmp_path), "--rerun-mode", "disabled"])
    assert_same_training(resumed, single_ranks, first=num_steps)


@pytest.mark.parametrize("transport", ["auto", "divided", pytest.param("rank0", marks=pytest.mark.full)])
def test_a_uniform_list_forced_on_is_exact(
    pool: Pool, equal_stages: list[ScriptRun], tmp_path: Path, transport: str
) -> None:
    """Where stages cut what crosses, each link carries its share."""
    audit = ["--vtp-audit", str(tmp_path / "audit.jsonl")] if transport == "divided" else []
    runs = train(pool, "2,2", ["--vtp-force", "--vtp-transport", transport, *audit])
    assert_same_training(runs, equal_stages, tolerance=0.0)
    seq_length, micro_batch_size, hidden_size = (int(MODEL[MODEL.index(name) + 1]) for name in _SHAPE)
    for path in tmp_path.iterdir():
        sent = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("way") == "sent"]
        found = {line["bytes"] for line in sent if line.get("cargo") in ("activation", "gradient")}
        assert found == {4 * seq_length * micro_batch_size * hidden_size // 2}


@pytest.mark.full
@pytest.mark.parametrize(
    "extra", [[], ["--sequence-parallel"], ["--seq-length", "13", "--max-position-embeddings", "13"]]
)
def test_equal_stages_that_cut_in_an_unequal_list(pool: Pool, extra: list[str]) -> None:
    """With sequence parallelism there is nothing to cut; rows that do not divide are cut all the same."""
    runs = train(pool, "1,2,2,1", [*extra, "--vtp-transport", "divided"])
    assert_same_training(runs, train(pool, "1,1,1,1", [word for word in extra if word != "--sequence-parallel"]))


@pytest.mark.full
def test_sequence_parallel_with_equal_stages(pool: Pool, equal_stages: list[ScriptRun]) -> None:
    """Transfers carry every rank's own rows; sequence parallelism only changes the order of sums."""
    extra = ["--sequence-parallel"]
    forced = train(pool, "2,2", [*extra, "--vtp-force"])
    assert_same_training(forced, train(pool, "2,2", extra), tolerance=0.0)
    assert_same_training(forced, equal_stages)


@pytest.mark.needs("one_virtual_stage", cases=("1,2,1,2",))
@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        pytest.param("1,2", ["--use-distributed-optimizer"], id="1,2"),
        pytest.param("2,3", ["--vtp-transport", "rank0"], id="2,3", marks=pytest.mark.full),
        pytest.param("2,4", [], id="2,4", marks=pytest.mark.full),
        pytest.param("1,2,1,2", ["--num-virtual-stages-per-pipeline-rank", "1"], id="1,2,1,2", marks=pytest.mark.full),
    ],
)
def test_sequence_parallel_with_unequal_stages(pool: Pool, sizes: str, extra: list[str]) -> None:
    assert_same_training(train(pool, sizes, [*extra, "--sequence-parallel"]), train(pool, uniform(sizes), extra))


@pytest.mark.full
def test_evaluation_before_fp16_has_found_its_scale_ends_in_one_line(pool: Pool) -> None:
    """Stock Megatron ends in a KeyError; with the line's ways out the run goes on."""
    half = ["--fp16", "--initial-loss-scale", str(2**40), "--hysteresis", "1", *OVERLAPPED]
    early = [*half, "--untie-embeddings-and-output-weights", "--eval-interval", "1", "--eval-iters", "1"]
    words = "lower --initial-loss-scale, raise --eval-interval, or leave --overlap-param-gather out"
    assert_refused(launch(pool, 3, {"arguments": arguments("1,2", extra=early)}), words)
    assert train(pool, "1,2", [*early, "--initial-loss-scale", "1024"])[-1].evaluations


@pytest.mark.full
def test_a_tied_embedding_that_one_stage_freezes_ends_in_one_line(pool: Pool) -> None:
    """Frozen by its name on the first stage, its copy on the last one would wait for a gradient; stock hangs."""
    runs = launch(pool, 3, {"arguments": arguments("1,2"), "hooks": ["freeze_by_name"]})
    assert_refused(runs, "requires_grad of the tied word embedding (freeze output_layer.weight of the last stage, too)")
    train(pool, "1,2", hooks=["freeze_embedding"])
