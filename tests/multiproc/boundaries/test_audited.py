"""Combinations of options that an outside reader ran against uniform runs, so that they stay as they are.

| what was run | where it is run now |
|---|---|
| decoupled learning rate; query and key norms; grouped queries; layouts; frozen weights; evaluation with its own batch sizes; `--skip-train`; fewer microbatches than stages; recomputation of blocks; split mode; per-token loss and `--iterations-to-skip` with unequal dp; a NaN; fp16 with overflows; gradients summed in bf16 | here |
| SGD's momentum; lists of replicas changed on resuming; a save that does not fit; SIGTERM | `test_audited_checkpoints.py` |
| ramp-up with unequal dp | `test_growing_batches.py` |
| all TensorBoard and timer flags; params norm; counts of zero gradients | `test_logged_numbers.py` |
| Adam, plain and reshardable, resumed in another list | `test_checkpoint.py::test_load_into_another_list` |
| experts from one checkpoint, with lists of EP | `test_experts_training.py::test_logged_router_losses` |
| memory, threads, descriptors over many steps | `test_growth.py` |
| context parallelism, which the audit left out | `test_training_context.py`, `test_parity.py` |
| empty and missing trackers, left out as well | `test_training_broken_files.py` |
| `--full-validation`, which is refused | `test_u_training.py`, `test_unequal_dp_training.py` |
| a rank that is killed during a save | `tests/hang/test_hangs.py` |
| saves in the background | `test_checkpoint.py::test_saved_in_the_background` |
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    evaluations,
    losses,
    num_ranks,
    uniform,
)
from tests.support.hosts import resharding_flags

pytestmark = [pytest.mark.full, pytest.mark.needs("scripts_here")]

TIED: tuple[str, ...] = ()
UNTIED = ("--untie-embeddings-and-output-weights",)
SEQUENCE = ("--sequence-parallel",)
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
OVERLAPPED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
BLOCKS = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
EVALUATE = ("--eval-interval", "2", "--eval-iters", "2")
OWN_BATCH = (*EVALUATE, "--eval-micro-batch-size", "1", "--eval-global-batch-size", "4")
PER_TOKEN = ("--calculate-per-token-loss",)
U_SHAPE = ("--layerwise-disaggregated-training", "--num-layer-list")


Reference = Callable[..., list[ScriptRun]]


@pytest.fixture(scope="module")
def reference(scripts: Scripts) -> Reference:
    """Uniform runs; each is made once."""
    known: dict[str, list[ScriptRun]] = {}

    def find(sizes: str, extra: Sequence[str], **options: Any) -> list[ScriptRun]:
        key = str((sizes, extra, options))
        if key not in known:
            known[key] = scripts.train(sizes, extra, **options)
        return known[key]

    return find


def _case(
    name: str,
    sizes: str,
    *extra: str,
    own: Sequence[str] = (),
    dp_list: str = "",
    dp: int = 1,
    hooks: Sequence[str] = (),
) -> Any:
    """Give a case. ``own``: options of the unequal run; ``dp_list``: its replicas; ``dp``: those of the uniform run."""
    own = (*own, *(("--vtp-dp-list", dp_list) if dp_list else ()))
    counts = [int(count) for count in dp_list.split(",")] if dp_list else [dp] * len(sizes.split(","))
    world = sum(int(tp) * count for tp, count in zip(sizes.split(","), counts, strict=True))
    return pytest.param(
        sizes, extra, own, dp, world, list(hooks), id=f"{name}-{sizes}{'-dp-' * bool(dp_list)}{dp_list}"
    )


FROZEN = ("freeze_embedding", "freeze_first_layer", "freeze_mlp", "freeze_all_but_norms")
CASES = [
    _case("decoupled-lr", "2,1", "--decoupled-lr", "1e-3", "--decoupled-min-lr", "1e-4"),
    _case("norms-of-queries", "1,3", "--qk-layernorm", own=SEQUENCE),
    _case("grouped-queries", "1,4", "--group-query-attention", "--num-query-groups", "2"),
    _case("layout", "2,1,2", "--pipeline-model-parallel-layout", "E|tttt|L"),
    _case("layout-untied", "1,2,1", "--pipeline-model-parallel-layout", "E|tttt|L", *UNTIED),
    *(_case(name.replace("_", "-"), "1,2", hooks=[name]) for name in FROZEN),
    *(
        _case(f"{name.replace('_', '-')}-overlapped", "2,1", *OVERLAPPED, *UNTIED, hooks=[name], dp=2)
        for name in FROZEN
    ),
    _case("own-batch", "1,2", *OWN_BATCH),
    _case("own-batch-interleaved", "2,1", *INTERLEAVED, *OWN_BATCH, own=SEQUENCE),
    _case("own-batch", "1,2", *OWN_BATCH, dp_list="1,2", dp=2),
    _case("few-microbatches", "2,1,2", "--num-layers", "6", "--global-batch-size", "4"),
    _case("few-microbatches", "1,1,2", "--num-layers", "6", "--global-batch-size", "8", dp_list="2,1,1", dp=2),
    _case("blocks-interleaved", "1,2", *INTERLEAVED, *BLOCKS, own=SEQUENCE),
    _case("split", "2,2", *BLOCKS, own=(*SEQUENCE, "--vtp-dp-mode", "split"), dp_list="1,2", dp=2),
    _case("uneven-masks", "1,2", *PER_TOKEN, dp_list="2,1", dp=2, hooks=["mask_losses"]),
    _case("skipped", "1,1", "--iterations-to-skip", "2", "3", own=("--vtp-force",)),
    _case("skipped", "1,1", "--iterations-to-skip", "2", "3", dp_list="1,2", dp=2),
]


@pytest.mark.needs("layouts", cases=("layout",))
@pytest.mark.needs("stock_without_overlap", cases=("blocks-interleaved",))
@pytest.mark.needs("own_evaluation_batch", cases=("own-batch",))
@pytest.mark.parametrize(("sizes", "extra", "own", "dp", "world", "hooks"), CASES)
def test_equals_the_uniform_run(
    scripts: Scripts,
    reference: Reference,
    sizes: str,
    extra: tuple[str, ...],
    own: tuple[str, ...],
    dp: int,
    world: int,
    hooks: list[str],
) -> None:
    wanted = reference(uniform(sizes), extra, dp=dp, hooks=hooks)
    command = arguments(sizes, dp=dp, extra=[*extra, *own])
    runs = scripts.finish(world, {"arguments": command, "hooks": hooks})
    assert_same_training(runs, wanted)
    assert len(set(losses(runs))) == len(losses(runs)), "it trains nothing"
    assert evaluations(runs) == pytest.approx(evaluations(wanted), rel=1e-5)
    assert len(evaluations(runs)) >= 2 * ("--eval-interval" in extra)
    if hooks and hooks[0].startswith("freeze"):
        assert losses(runs) != losses(reference(uniform(sizes), extra, dp=dp)), "nothing is frozen"


@pytest.mark.parametrize(
    ("hook", "extra"),
    [
        pytest.param("freeze_embedding", (), id="embedding"),
        pytest.param("freeze_first_layer", (), id="layer"),
        pytest.param("freeze_words", OVERLAPPED, id="words-overlapped"),
    ],
)
def test_frozen_weights_of_a_u(scripts: Scripts, tmp_path: Path, hook: str, extra: tuple[str, ...]) -> None:
    folder = str(tmp_path)
    scripts.train("1", ["--save", folder, "--save-interval", "1", "--exit-interval", "1"])
    weights = ["--load", folder, "--finetune"]
    wanted = scripts.train("1", weights, hooks=[hook])
    assert_same_training(scripts.train("1,2", [*U_SHAPE, "1,1,2", *weights, *extra], hooks=[hook]), wanted)
    assert losses(wanted) != losses(scripts.train("1", weights)), "nothing is frozen"


@pytest.mark.parametrize(("sizes", "dp_list", "world"), [("1,2", "", 3), ("1,1", "1,2", 3)])
def test_evaluation_alone(scripts: Scripts, tmp_path: Path, sizes: str, dp_list: str, world: int) -> None:
    folder = str(tmp_path)
    scripts.train("1,1", [*EVALUATE, "--save", folder, "--save-interval", "2"])
    only = [*EVALUATE, "--skip-train", "--load", folder, *resharding_flags()]
    wanted = evaluations(scripts.train("1,1", only))
    command = arguments(sizes, extra=[*only, *(("--vtp-dp-list", dp_list) if dp_list else ())])
    runs = scripts.finish(world, {"arguments": command})
    assert not any(run.steps for run in runs)
    assert len(wanted) >= 2 and evaluations(runs) == pytest.approx(wanted, rel=1e-5)


def test_a_weight_that_is_not_a_number(scripts: Scripts) -> None:
    """All ranks end, as those of the uniform run do, and with its message."""
    ours, theirs = (
        scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes), "hooks": ["break_a_weight"]})
        for sizes in ("1,2", "1,1")
    )
    assert all(run.exit_code not in (0, None) for run in (*ours, *theirs)), [run.exit_code for run in (*ours, *theirs)]
    message = re.compile(r"found NaN in local forward loss|Unexpected result nan", re.IGNORECASE)
    assert any(message.search(run.output) for run in theirs), theirs[1].output[-3000:]
    assert any(message.search(run.output) for run in ours), ours[1].output[-3000:]


# Gradients are added up in fp32: in fp16 a stage of fewer replicas adds more of them, and overflows at half the scale.
HALF = (
    *("--fp16", "--accumulate-allreduce-grads-in-fp32", "--initial-loss-scale", "4194304", "--hysteresis", "1"),
    *("--loss-scale-window", "2", "--train-iters", "8", "--global-batch-size", "16"),
)


def _scales(runs: Sequence[ScriptRun]) -> list[tuple[str, str]]:
    """Give the loss scale and the number of steps left out of every printed line."""
    (output,) = [run.output for run in runs if "lm loss:" in run.output]
    return re.findall(r"loss scale: (\S+) .*number of skipped iterations: +(\d+)", output)


@pytest.mark.parametrize(
    ("sizes", "own", "world", "uniform_dp"),
    [
        pytest.param("1,2", (), 3, 1, id="plain"),
        pytest.param("2,1", OVERLAPPED, 6, 2, id="overlapped"),
        # Megatron divides a loss by the microbatches of its rank: the uniform run has the replicas of the last stage.
        pytest.param("1,2", ("--vtp-dp-list", "2,1"), 4, 1, id="dp-list"),
        pytest.param("2,1", ("--vtp-dp-list", "1,2", *OVERLAPPED), 4, 2, id="dp-list-overlapped"),
    ],
)
def test_overflows_in_half_precision(
    scripts: Scripts, reference: Reference, sizes: str, own: tuple[str, ...], world: int, uniform_dp: int
) -> None:
    """The same steps are left out, with the same loss scales."""
    wanted = reference("1,1", HALF, dp=uniform_dp)
    command = arguments(sizes, extra=[*HALF, *own])
    runs = scripts.finish(world, {"arguments": command})
    assert _scales(runs) == _scales(wanted)
    assert len({skipped for _, skipped in _scales(runs)}) > 1, "no step is left out, or all"
    assert losses(runs) == pytest.approx(losses(wanted), rel=2e-3)


@pytest.mark.parametrize(("sizes", "own", "world"), [("1,2", (), 6), ("2,1", ("--vtp-dp-list", "1,2"), 4)])
def test_gradients_summed_in_bf16(
    scripts: Scripts, reference: Reference, sizes: str, own: tuple[str, ...], world: int
) -> None:
    """What differs is rounding: uniform runs of other sizes lie as far from the run in fp32, and from each other."""
    half = ("--bf16", "--grad-reduce-in-bf16", "--lr", "1e-3", "--min-lr", "1e-3", "--train-iters", "8")
    command = arguments(sizes, dp=2, extra=[*half, *own])
    runs = losses(scripts.finish(world, {"arguments": command}))
    uniform_runs = [losses(reference(other, half, dp=2)) for other in ("1,1", "2,2")]
    exact = losses(reference("1,1", half[2:], dp=2))
    usual = max(_distance(other, exact) for other in uniform_runs)
    assert _distance(*uniform_runs) > 1e-5, "the sizes of a uniform run change nothing: there is no rounding"
    assert _distance(runs, exact) < 2 * usual, (runs, uniform_runs, exact)
    assert _distance(runs, uniform_runs[0]) < 2 * usual, (runs, uniform_runs, exact)


def _distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Give the largest relative difference of two rows."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
