"""The rest of `test_swift.py`: families, layouts, adapters, checkpoints, ways to start, what is not supported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import ROOT
from tests.swift.runs import STEPS, Done, Run, assert_alike, assert_same_export, run_all

pytestmark = pytest.mark.full
SP = {"sequence_parallel": "true"}
EXPORT = {"save_safetensors": "true"}
KEPT = {"save_steps": "3", "no_save_optim": "false", "no_save_rng": "false"}
LORA = {"tuner_type": "lora", "lora_rank": "4", "lora_dropout": "0", "merge_lora": "false", **EXPORT}
PACKED = {"packing": "true", "packing_length": "128", "micro_batch_size": "1"}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"}
OVERLAP = {"overlap_grad_reduce": "true", "overlap_param_gather": "true"}
U = "--layerwise-disaggregated-training --num-layer-list 1,2,1"
LONG_U = "--layerwise-disaggregated-training --num-layer-list 1,1,1,1"
PAIRS = {
    "three": Run(name="three", sizes=(2, 1, 3), words={**SP, **EXPORT, "decoder_first_pipeline_num_layers": "2"}),
    "replicas": Run(name="replicas", sizes=(1, 2), dp=2, words={**SP, **OVERLAP, **EXPORT}),
    "interleaved": Run(name="interleaved", sizes=(2, 1), words={**SP, "pipeline_model_parallel_layout": "Et|t|t|tL"}),
    "recomputed": Run(name="recomputed", sizes=(1, 2), words={**SP, **RECOMPUTED}),
    "rows": Run(name="rows", sizes=(1, 2), words={"padding_free": "false"}),
    "undistributed": Run(name="undistributed", sizes=(1, 2), words={"use_distributed_optimizer": "false"}),
    "u-three": Run(name="u-three", sizes=(2, 1, 3), words={**SP, **EXPORT}, vtp=LONG_U),
    "u-replicas": Run(name="u-replicas", sizes=(1, 2), dp=2, words={**SP, **OVERLAP}, vtp=U),
}
"""Runs that are compared with `1,1` of the same model and data."""
MORE = {
    "qwen3": ((2, 1), "qwen3", SP),
    "llama": ((1, 2), "llama", SP),
    "packed": ((1, 2), "qwen2", {**SP, **PACKED}),
    "evaluated": ((1, 2), "qwen2", {**SP, "val_dataset": "eval.jsonl", "eval_steps": "2"}),
    "adapters": ((1, 2), "qwen2", {**SP, **LORA}),
}
"""Name, sizes, model and flags of runs beside which `1,1` runs with the same flags."""
IN_U = ("evaluated", "adapters")
"""Those of them that run as a U, too."""


NO_DOOR = {"external_plugins": None}
PROGRAM = ROOT / "vtp_plugin" / "__main__.py"
_THREE = {**SP, "decoder_first_pipeline_num_layers": "2"}
WRONG = {
    "chunk": (Run(name="no-chunk", sizes=(1, 2), vtp=U, without="swift-empty-chunk"), "float division by zero"),
    "model": (Run(name="no-model", sizes=(1, 2), without="swift-model"), "tensor_model_parallel_size=2, but stage 0"),
    "rows": (Run(name="no-rows", sizes=(2, 1, 3), words=_THREE, without="swift-rows"), "error: "),
    "greatest": (Run(name="no-greatest", sizes=(1, 2), words=EXPORT, without="greatest"), "error: "),
    "padding": (Run(name="no-padding", sizes=(1, 2), model="qwen2-tied-odd", without="padding"), "error: "),
}
"""What the plugin does: a run without it, and what ends that."""
UNSUPPORTED = {
    "experts": (Run(name="experts", sizes=(1, 2), model="qwen3_moe"), "model with num_moe_experts 4; "),
    "streaming": (Run(name="streaming", sizes=(1, 2), words={"streaming": "true"}), "--streaming True; "),
    "planned": (Run(name="planned", sizes=(1, 2), vtp="--vtp-schedule planned"), "--vtp-schedule; "),
    "u": (
        Run(name="u", sizes=(1, 2), words={"pipeline_model_parallel_layout": "Et|ttt|L|"}, vtp=U),
        "contradicts --num-layer-list 1,2,1; leave it out, or give Et|tt|tL|",
    ),
    "tp": (
        Run(name="tp", sizes=(1, 2), words={"tensor_model_parallel_size": "4"}),
        "4 contradicts --vtp-size-list 1,2",
    ),
    "flags": (Run(name="flags", sizes=(1, 2), vtp="--lr 0.1"), "VTP_FLAGS has --lr 0.1; "),
}
"""What does not go with unequal stages, and how the line that says so begins."""


def _started_by_run() -> dict[str, Any]:
    package = importlib.util.find_spec("swift")
    if package is None or package.origin is None:
        return {}
    script = Path(package.origin).parent / "cli" / "_megatron" / "sft.py"
    behind = ("--vtp-size-list", "1,2", "--vtp-device", "cpu")
    return {"before": ("run", str(script)), "behind": behind, "words": NO_DOOR}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grid")


@pytest.fixture(scope="module")
def done(models: Path, folder: Path) -> dict[str, Done]:
    # ms-swift takes the optimizer out of what it loads where the run itself would not save it.
    resumed, u_resumed = (
        {**KEPT, "finetune": "false", "mcore_model": str(folder / name / "checkpoint-3")} for name in ("kept", "u-pt")
    )
    tied = "qwen2-tied-odd"
    runs = [
        Run(name="uniform", sizes=(1, 1), words=EXPORT),
        *(run for run, _ in (*UNSUPPORTED.values(), *WRONG.values())),
        Run(name="run", sizes=(1, 2), script=str(PROGRAM), **_started_by_run()),
        Run(name="lines", sizes=(1, 2), script=str(Path(__file__).with_name("two_lines.py")), words=NO_DOOR),
    ]
    for name, (sizes, model, words) in MORE.items():
        given = {key: str(models / value) if key == "val_dataset" else value for key, value in words.items()}
        runs += [Run(name=f"{name}-equal", sizes=(1, 1), model=model, words=given)]
        runs += [Run(name=name, sizes=sizes, model=model, words=given)]
        runs += [Run(name=f"u-{name}", sizes=sizes, model=model, words=given, vtp=U)] * (name in IN_U)
    runs += [
        Run(name="pt-equal", sizes=(1, 1), command="pt"),
        Run(name="pt", sizes=(1, 2), command="pt", words=SP),
        Run(name="u-pt", sizes=(1, 2), command="pt", words={**SP, **KEPT}, vtp=U),
        Run(name="u-again", sizes=(1, 2), command="pt", words={**SP, **u_resumed}, vtp=U),
        Run(name="u-left", sizes=(2, 1), command="pt", words={**SP, **u_resumed}),
        *PAIRS.values(),
        Run(name="kept", sizes=(1, 2), words={**SP, **KEPT}),
        Run(name="again", sizes=(1, 2), words={**SP, **resumed}),
        Run(name="stock", sizes=(1, 1), words=resumed),
        # The stand-in's attention does not know context parallelism: these numbers are no model's.
        Run(name="cp", sizes=(1, 1), dp=2, words={"context_parallel_size": "2"}),
        Run(name="tied-equal", sizes=(2, 2), model=tied, words=EXPORT),
        Run(name="tied", sizes=(1, 2), model=tied, words=EXPORT),
        Run(name="u-tied", sizes=(2, 1), model=tied, words=EXPORT, vtp=U),
    ]
    return run_all(runs, models, folder)


@pytest.mark.parametrize("name", PAIRS)
def test_a_layout(done: dict[str, Done], name: str) -> None:
    assert_alike(done[name], done["uniform"])


@pytest.mark.parametrize("name", [*MORE, "tied", "pt", *(f"u-{name}" for name in (*IN_U, "tied", "pt"))])
def test_a_model_or_way(done: dict[str, Done], name: str) -> None:
    assert_alike(done[name], done[f"{name.removeprefix('u-')}-equal"])


def test_equal_stages_start_with_context_parallelism(done: dict[str, Done]) -> None:
    assert {*done["cp"].codes} == {0} and len(done["cp"].logged()) == STEPS


@pytest.mark.parametrize("name", ["evaluated", "u-evaluated"])
def test_evaluation(done: dict[str, Done], name: str) -> None:
    expected = done["evaluated-equal"].logged("eval_loss")
    assert len(expected) >= 2 and done[name].logged("eval_loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["three", "replicas", "u-three"])
def test_exported_weights(done: dict[str, Done], models: Path, name: str) -> None:
    assert_same_export(done[name], done["uniform"], models / "qwen2")


@pytest.mark.parametrize("name", ["tied", "u-tied"])
def test_exported_weights_with_a_vocabulary_that_is_padded(done: dict[str, Done], models: Path, name: str) -> None:
    assert_same_export(done[name], done["tied-equal"], models / "qwen2-tied-odd")


@pytest.mark.parametrize("name", ["adapters", "u-adapters"])
def test_exported_adapters(done: dict[str, Done], name: str) -> None:
    assert_same_export(done[name], done["adapters-equal"], None)


@pytest.mark.parametrize("name", ["again", "stock"])
def test_resuming(done: dict[str, Done], name: str) -> None:
    assert_alike(done[name], done["uniform"], first=3)
    if name == "again":
        # The same list: every printed digit.
        assert done[name].logged() == done["kept"].logged()[3:]


@pytest.mark.parametrize("name", ["u-again", "u-left"])
def test_resuming_a_u(done: dict[str, Done], name: str) -> None:
    assert_alike(done[name], done["pt-equal"], first=3)


@pytest.mark.parametrize("name", ["run", "lines"])
def test_other_ways_to_start(done: dict[str, Done], name: str) -> None:
    assert_alike(done[name], done["uniform"])


@pytest.mark.parametrize("name", WRONG)
def test_without_it_a_run_ends(done: dict[str, Done], name: str) -> None:
    run, text = WRONG[name]
    assert 0 not in done[run.name].codes
    assert any(text in done[run.name].log(rank) for rank in range(sum(run.sizes)))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_not_supported_is_one_line(done: dict[str, Done], name: str) -> None:
    run, text = UNSUPPORTED[name]
    assert 0 not in done[run.name].codes
    for rank in range(sum(run.sizes)):
        (line,) = [line for line in done[run.name].log(rank).splitlines() if "] error: " in line]
        assert text in line and "Traceback" not in done[run.name].log(rank)


def test_the_example(tmp_path: Path) -> None:
    losses = []
    for sizes in ("1,2", "1,1"):
        given = {**os.environ, "SIZES": sizes, "OUT": str(tmp_path), "BIN": str(Path(sys.executable).parent)}
        ran = subprocess.run([ROOT / "examples" / "ms_swift" / "sft.sh"], env=given, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        losses.append(Done([0], tmp_path / f"run-{sizes}").logged())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == STEPS
