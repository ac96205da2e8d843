"""The example script on megatron.training: every list trains as the uniform run with as many stages."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    EXAMPLE,
    MODEL,
    VOCAB,
    ScriptRun,
    Scripts,
    arguments,
    assert_same_training,
    evaluations,
    grad_norms,
    losses,
    num_ranks,
    uniform,
)
from tests.support.hosts import PYTHON_PATH, ROOT, host_name, prints_first_step
from tests.support.pool import ENVIRONMENT
from vtp_plugin.patches.hosts import load_host
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.registry import declared_at

pytestmark = pytest.mark.needs("scripts_here")


Reference = Callable[..., list[ScriptRun]]

UNTIED = ["--untie-embeddings-and-output-weights"]
DISTRIBUTED = ["--use-distributed-optimizer"]
OVERLAPPED = [*DISTRIBUTED, "--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000"]
RECOMPUTE = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
EVALUATE = ["--eval-interval", "2", "--eval-iters", "2"]
PER_TOKEN = ["--calculate-per-token-loss"]
REPLICA_MAJOR = ["--use-tp-pp-dp-mapping"]
COUNT_ZEROS = ["--log-num-zeros-in-grad"]
INTERLEAVED = ["--num-virtual-stages-per-pipeline-rank", "2"]
# Three stages of two chunks need two layers each and a number of microbatches that three divides.
INTERLEAVED_3 = [*INTERLEAVED, "--num-layers", "6", "--global-batch-size", "12"]
SGD = ["--optimizer", "sgd", "--lr", "1e-1"]


@pytest.fixture(scope="module")
def reference(scripts: Scripts) -> Reference:
    """Runs of uniform lists; each is made once."""
    known: dict[tuple[object, ...], list[ScriptRun]] = {}

    def find(sizes: str, extra: Sequence[str] = (), *, dp: int = 1, hooks: Sequence[str] = ()) -> list[ScriptRun]:
        key = (sizes, tuple(extra), dp, tuple(hooks))
        if key not in known:
            known[key] = scripts.train(sizes, extra, dp=dp, hooks=list(hooks))
        return known[key]

    return find


def _case(name: str, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, full: bool = False, **options: Any) -> Any:
    marks = [pytest.mark.full] if full else []
    return pytest.param(sizes, list(extra), dp, options, id=f"{name}-{sizes}-dp{dp}", marks=marks)


@pytest.mark.needs("tied_and_distributed", cases=("overlapped-2,1-dp2",))
@pytest.mark.needs(
    "stock_without_overlap",
    cases=("interleaved-recompute-2,1-dp1", "overlapped-interleaved-1,2-dp2", "replica-major-1,2-dp2"),
)
@pytest.mark.parametrize(
    ("sizes", "extra", "dp", "options"),
    [
        pytest.param("1,2", EVALUATE, 1, {}, id="tied-evaluate-1,2-dp1", marks=pytest.mark.smoke),
        _case("untied-recompute", "2,1", [*UNTIED, *RECOMPUTE, *COUNT_ZEROS], full=True),
        _case("overlapped", "1,2", OVERLAPPED, dp=2, full=True),
        _case("interleaved-per-token", "1,2,1", [*INTERLEAVED_3, *PER_TOKEN], hooks=["mask_losses"], full=True),
        _case("replica-major-masks", "2,1", [*REPLICA_MAJOR, *EVALUATE], dp=2, hooks=["mask_losses"], full=True),
        _case("plain", "2,3", full=True),
        _case("plain", "3,1,2", ["--num-layers", "6"], full=True),
        _case("plain", "1,4", full=True),
        _case("sgd-untied", "1,2,1,2", [*SGD, *UNTIED], full=True),
        _case("distributed", "1,2", DISTRIBUTED, dp=2, full=True),
        _case("distributed-dp1", "2,1", DISTRIBUTED, full=True),
        _case("overlapped", "2,1", [*OVERLAPPED, *EVALUATE], dp=2, full=True),
        _case("overlapped-untied", "1,2", [*OVERLAPPED, *UNTIED, *REPLICA_MAJOR], dp=2, full=True),
        _case("overlapped-interleaved", "1,2", [*INTERLEAVED, *OVERLAPPED, *EVALUATE], dp=2, full=True),
        _case("interleaved-recompute", "2,1", [*INTERLEAVED, *RECOMPUTE, *UNTIED], full=True),
        _case("interleaved-per-token", "2,1,2", [*INTERLEAVED_3, *PER_TOKEN], hooks=["mask_losses"], full=True),
        _case("per-token", "1,2", [*PER_TOKEN, *DISTRIBUTED], dp=2, hooks=["mask_losses"], full=True),
        _case("per-token", "2,3", PER_TOKEN, hooks=["mask_losses"], full=True),
        _case("replica-major", "1,2", [*REPLICA_MAJOR, *INTERLEAVED, *DISTRIBUTED], dp=2, full=True),
        _case("evaluate-recompute", "2,1,1", [*EVALUATE, *RECOMPUTE, "--num-layers", "6"], full=True),
    ],
)
def test_equals_uniform_run(
    scripts: Scripts, reference: Reference, sizes: str, extra: list[str], dp: int, options: dict[str, Any]
) -> None:
    runs = scripts.train(sizes, extra, dp=dp, **options)
    wanted = reference(uniform(sizes), extra, dp=dp, **options)
    assert_same_training(runs, wanted)
    assert len(set(losses(runs))) == len(losses(runs)), "it trains nothing"
    assert len(evaluations(runs)) == len(evaluations(wanted))
    assert evaluations(runs) == pytest.approx(evaluations(wanted), rel=1e-5)
    if "--eval-interval" in extra:
        assert len(evaluations(runs)) >= 2
    if COUNT_ZEROS[0] in extra:
        counts = [[step.num_zeros for step in group[0].steps] for group in (runs, wanted)]
        # Rows of the embedding that no token uses; a few gradients that should be zero are rounding errors instead.
        assert max(counts[1]) > 100
        assert counts[0] == pytest.approx(counts[1], abs=5)
    if options.get("hooks"):
        counted = [n for run in runs for n in run.facts.get("counted", [])]
        assert len(set(counted)) > 1, "every sample counts the same number of tokens: the case shows nothing"


# Row-parallel layers round their partial sums to 8 bits of mantissa before they are added, a uniform run rounds once.
@pytest.mark.needs("stock_without_overlap", cases=("1,2-interleaved",))
@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("1,2", DISTRIBUTED, 2, id="1,2-distributed", marks=pytest.mark.full),
        pytest.param("2,1", [], 1, id="2,1"),
        pytest.param("1,2", [*INTERLEAVED, *UNTIED], 1, id="1,2-interleaved", marks=pytest.mark.full),
    ],
)
def test_bf16_stays_near_the_uniform_run(
    scripts: Scripts, reference: Reference, sizes: str, extra: list[str], dp: int
) -> None:
    # A small learning rate keeps the weights, and with them the gradients, comparable.
    extra = ["--bf16", "--lr", "1e-3", "--min-lr", "1e-3", *extra]
    runs = scripts.train(sizes, extra, dp=dp)
    assert_same_training(runs, reference(uniform(sizes), extra, dp=dp), tolerance=1e-2)
    assert all("using torch.bfloat16" in run.output for run in runs[:1])


def test_auto_takes_a_stage_per_node(scripts: Scripts, reference: Reference) -> None:
    command = arguments("1,2")
    command[command.index("--vtp-size-list") + 1] = "auto"
    runs = scripts.finish(3, {"arguments": command}, node_sizes=[1, 2])
    assert_same_training(runs, reference("1,1"))
    assert re.search(r"^\[vtp rank 0\] +1 +2 +1 +1 +2 +1-2 +1$", runs[0].output, flags=re.MULTILINE), (
        "the list is not shown"
    )


def test_auto_divides_by_replicas(scripts: Scripts) -> None:
    command = arguments("1,2", dp=2, extra=["--vtp-data-parallel-size", "2"])
    command[command.index("--vtp-size-list") + 1] = "auto"
    runs = scripts.finish(6, {"arguments": command}, node_sizes=[2, 4])
    assert len(losses(runs)) == 4
    assert "6 ranks, TP sizes 1,2" in runs[0].output


@pytest.mark.parametrize("sizes", ["2", *(pytest.param(sizes, marks=pytest.mark.full) for sizes in ("1,1", "2,2"))])
def test_uniform_list_is_stock_megatron_bit_by_bit(scripts: Scripts, sizes: str) -> None:
    forced = scripts.train(sizes, ["--vtp-force"])
    command = arguments(sizes)
    command = command[: command.index("--vtp-device")]
    command += ["--tensor-model-parallel-size", sizes[0], "--pipeline-model-parallel-size", str(len(sizes.split(",")))]
    # The multiple of the vocabulary is the same, as stock Megatron multiplies by its one size too.
    stock = scripts.finish(num_ranks(sizes), {"arguments": command, "how": "stock"})
    assert losses(forced) == losses(stock)
    assert grad_norms(forced) == grad_norms(stock)


def test_apply_without_a_list_leaves_megatron_alone(scripts: Scripts, reference: Reference) -> None:
    command = arguments("1,1")
    position = command.index("--vtp-device")
    del command[position : position + 4]
    command += ["--pipeline-model-parallel-size", "2"]
    runs = scripts.finish(2, {"arguments": command, "how": "apply", "hooks": ["note_patches"]})
    assert losses(runs) == losses(reference("1,1"))
    host, moments = load_host(host_name()), (Moment.COMMAND_LINE, Moment.PLATFORM, Moment.CPU)
    without_list = {record.id for moment in moments for record in declared_at(moment, host)}
    for run in runs:
        assert not run.facts["is_vtp_enabled"]
        assert run.facts["size_list"] is None
        assert set(run.facts["applied"]) <= without_list, run.facts
        assert run.facts["changed_after_revert"] == []


def test_revert_restores_everything(scripts: Scripts) -> None:
    runs = scripts.train("1,2", hooks=["note_patches"])
    for run in runs:
        assert run.facts["is_vtp_enabled"]
        assert {
            *("vtp-flags", "argument-checks", "parallel-state"),
            *("finalize-model-grads", "checkpoint-integrity", "checkpoint-layout"),
        } <= set(run.facts["applied"])
        assert run.facts["num_replaced"] > len(run.facts["applied"])
        assert run.facts["changed_after_revert"] == []


@pytest.mark.parametrize(
    ("kwargs", "flags"),
    [
        pytest.param({"vtp_size_list": [1, 2], "device": "cpu"}, [], id="all-in-apply"),
        pytest.param({"device": "cpu"}, ["--vtp-size-list", "1,2"], id="device-in-apply", marks=pytest.mark.full),
        pytest.param(
            {"vtp_size_list": "1,2"},
            ["--vtp-size-list", "1,2", "--vtp-device", "cpu", "--tensor-model-parallel-size", "2"]
            + ["--pipeline-model-parallel-size", "2"],
            id="list-twice-and-sizes-that-agree",
        ),
    ],
)
def test_apply_in_the_script(scripts: Scripts, reference: Reference, kwargs: dict[str, Any], flags: list[str]) -> None:
    command = arguments("1,2")
    position = command.index("--vtp-device")
    command[position : position + 4] = flags
    runs = scripts.finish(3, {"arguments": command, "how": "apply", "apply_kwargs": kwargs})
    assert_same_training(runs, reference("1,1"))


def test_help_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import argparse, sibling\nargparse.ArgumentParser(prog=sibling.NAME).parse_args()\n")
    (tmp_path / "sibling.py").write_text("NAME = 'the script itself'\n")
    command = [sys.executable, "-m", "vtp_plugin", "run", str(script), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.startswith("usage: the script itself")


TWO_LINES = "import vtp_plugin; vtp_plugin.apply()\n"


@pytest.mark.full
@pytest.mark.parametrize("form", ["run", "apply"])
def test_torchrun_end_to_end(tmp_path: Path, reference: Reference, form: str) -> None:
    """A script that imports a module beside it, and saves, so that children import it again."""
    text = Path(EXAMPLE).read_text()
    first_import = re.search(r"^(import|from (?!__future__))", text, re.MULTILINE)
    assert first_import is not None
    script, sibling = tmp_path / "pretrain.py", tmp_path / "sibling_of_pretrain.py"
    lines = "from sibling_of_pretrain import greet\n" + (TWO_LINES if form == "apply" else "")
    main = 'if __name__ == "__main__":\n'
    body = text[first_import.start() :].replace(main, f"{main}    greet()\n")
    script.write_text(text[: first_import.start()] + lines + body)
    sibling.write_text("def greet():\n    print('hello from beside', flush=True)\n")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    target = ["-m", "vtp_plugin", "run", str(script)] if form == "run" else [str(script)]
    command = [*launcher, *target, *arguments("1,2", extra=["--save", str(tmp_path / "saved"), "--save-interval", "4"])]
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH}
    one = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=tmp_path, env=env, timeout=600, check=False, **one)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("hello from beside") == 3
    # Megatron says the world of rank 0's stage, then hundreds of arguments: the truth stands between them.
    told = "3 ranks, TP sizes 1,2; Megatron's lines above, and its arguments below, show rank 0's stage"
    places = [done.stdout.index(text) for text in ("using world size: ", told, "- arguments -")]
    assert places == sorted(places)
    assert re.search(r"stage  tp  cp  dp  layers  ranks  leaders\n.*\b0   1   1   1       2  0      0\n", done.stdout)
    saved = re.escape(str(tmp_path / "saved" / "iter_0000004"))
    (end,) = re.findall(
        rf"\[vtp rank 0\] done: 4 steps, median [\d.]+ m?s, checkpoint\s(?:.*\s)?{saved}\n", done.stdout
    )
    assert done.stdout.index(end) > done.stdout.index("lm loss")
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "4"
    printed = [float(text) for text in re.findall(r"lm loss: ([0-9.E+-]+)", done.stdout)]
    first, second, *others = losses(reference("1,1", hooks=["all_documents"]))
    # Megatron prints the first step and does not reset its sum: the second line is the mean of two steps.
    second = (first + second) / 2 if prints_first_step() else second
    assert printed == pytest.approx([first, second, *others], rel=1e-5)


def test_vocabulary_hint_is_true(scripts: Scripts) -> None:
    """The flag that start-up names gives the uniform run the same padded vocabulary."""
    command = [*MODEL, "--train-iters", "1", "--global-batch-size", "8", "--vtp-device", "cpu"]
    command += ["--vtp-log-level", "DEBUG", "--make-vocab-size-divisible-by", "7"]
    runs = scripts.finish(3, {"arguments": [*command, "--vtp-size-list", "1,2"]})
    hint = re.search(r"--make-vocab-size-divisible-by (\d+)$", runs[0].output, flags=re.MULTILINE)
    assert hint is not None
    command[-1] = hint.group(1)
    others = scripts.finish(2, {"arguments": [*command, "--vtp-size-list", "1,1"]})
    padded = [re.findall(r"padded vocab .*new size: (\d+)", group[0].output) for group in (runs, others)]
    # One token more, the end of a document, then up to a multiple of 7 x 2.
    assert padded == [[str(math.ceil((VOCAB + 1) / 14) * 14)]] * 2
    assert_same_training(runs, others)
