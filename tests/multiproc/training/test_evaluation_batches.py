"""Evaluation with batches of its own, in scripts whose ranks make memory for a microbatch by the arguments' sizes.

NVIDIA's ``get_batch`` does so: ranks that do not read make it for ``--micro-batch-size``, and what is sent to them in
an evaluation has ``--eval-micro-batch-size``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_same_training, evaluations, uniform
from tests.support.hosts import ROOT, TREE
from tests.support.lines import warnings

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("own_evaluation_batch")]

SHARES_BY_ARGUMENTS = str(ROOT / "tests" / "multiproc" / "faults" / "nvidia_gpt.py")
NVIDIAS = str(Path(TREE) / "pretrain_gpt.py")
LARGER = ["--eval-interval", "2", "--eval-iters", "2", "--eval-micro-batch-size", "4", "--eval-global-batch-size", "8"]
SMALLER = ["--eval-interval", "2", "--eval-iters", "2", "--eval-micro-batch-size", "1", "--eval-global-batch-size", "4"]
U_SHAPE = ["--layerwise-disaggregated-training", "--num-layer-list", "1,2,1"]


def _case(
    sizes: str,
    batches: list[str],
    *own: str,
    world: int,
    hooks: tuple[str, ...] = (),
    name: str = "",
    full: bool = True,
) -> Any:
    marks = [pytest.mark.full] if full else []
    return pytest.param(sizes, batches, [*own], world, [*hooks], id=f"{name}{sizes}", marks=marks)


IN_SCRIPTS = pytest.mark.parametrize(
    "script",
    [
        SHARES_BY_ARGUMENTS,
        pytest.param(
            NVIDIAS, marks=[pytest.mark.full, pytest.mark.skipif(not TREE, reason="VTP_MEGATRON_LM names no tree")]
        ),
    ],
    ids=["as-nvidias", "nvidias"],
)


@IN_SCRIPTS
@pytest.mark.parametrize(
    ("sizes", "batches", "own", "world", "hooks"),
    [
        _case("1,2", SMALLER, world=3, full=False),
        _case("3,1", LARGER, "--sequence-parallel", world=4),
        _case("2,2", LARGER, "--vtp-dp-list", "1,2", world=6, name="dp-"),
        _case("2,2", LARGER, "--vtp-dp-list", "1,2", "--vtp-dp-mode", "split", world=6, name="split-"),
        _case("2,1", SMALLER, "--vtp-cp-list", "1,2", world=4, hooks=("gathered_attention",), name="cp-"),
        _case("2,2", SMALLER, "--vtp-force", world=4, name="forced-"),
    ],
)
def test_batches_of_evaluation(
    scripts: Scripts, script: str, sizes: str, batches: list[str], own: list[str], world: int, hooks: list[str]
) -> None:
    batch = ["--global-batch-size", "16"]
    command = {"arguments": arguments(sizes, extra=[*batch, *batches, *own]), "script": script, "hooks": hooks}
    runs = scripts.finish(world, command)
    wanted = scripts.train(uniform(sizes), [*batch, *batches], hooks=hooks)
    assert_same_training(runs, wanted)
    assert len(evaluations(runs)) >= 2 and evaluations(runs) == pytest.approx(evaluations(wanted), rel=1e-5)
    assert not any(warnings(run.output) for run in runs)


@pytest.mark.full
@IN_SCRIPTS
def test_batches_of_evaluation_on_an_edge(scripts: Scripts, tmp_path: Path, script: str) -> None:
    folder = str(tmp_path)
    scripts.train("1", ["--save", folder, "--save-interval", "1", "--exit-interval", "1"])
    words = ["--load", folder, "--finetune", *SMALLER]
    runs = scripts.train("2,1", [*words, *U_SHAPE], script=script)
    wanted = scripts.train("1", words)
    assert_same_training(runs, wanted)
    assert len(wanted[0].evaluations) >= 2
    assert runs[0].evaluations == pytest.approx(wanted[0].evaluations, rel=1e-5)


def test_stock_ends_and_says_so_at_the_start(scripts: Scripts) -> None:
    """With a uniform list Megatron stays as it is."""
    command = {"arguments": arguments("2", extra=SMALLER), "script": SHARES_BY_ARGUMENTS, "timeout_s": 60.0}
    ended = scripts.launch(2, command)
    # In gloo, which ends the process, or in torch.
    assert any(run.exit_code for run in ended)
    assert any(re.search(r"iteration +2/", run.output) for run in ended) and not any(run.evaluations for run in ended)
    (line,) = [line for run in ended for line in warnings(run.output)]
    assert line.startswith("--eval-micro-batch-size 1 with --vtp-size-list 2; ")
    assert line.endswith("give --eval-micro-batch-size the value of --micro-batch-size")
