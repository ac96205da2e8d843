"""Experts through megatron.training: what is logged, checkpoints that move between lists, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts import host_name
from tests.multiproc.script_cases import (
    ScriptRun,
    arguments,
    assert_refused,
    assert_same_training,
    launch,
    num_ranks,
    train,
)
from tests.pool import Pool

pytestmark = pytest.mark.skipif(host_name() != "0.19", reason="experts are refused")

# Megatron's local experts fail with fused activations and with biases.
EXPERTS = ["--num-experts", "6", "--moe-router-topk", "2", "--no-bias-gelu-fusion", "--disable-bias-linear"]
EXPERTS += [
    "--moe-router-load-balancing-type",
    "aux_loss",
    "--moe-aux-loss-coeff",
    "0.01",
    "--moe-z-loss-coeff",
    "1e-3",
]
EXPERTS += ["--moe-token-dispatcher-type", "alltoall", "--moe-ffn-hidden-size", "96", "--sequence-parallel"]
EXPERTS += ["--moe-per-layer-logging"]
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
DISTRIBUTED += ["--dist-ckpt-optim-fully-reshardable"]
BATCH = ["--global-batch-size", "16"]  # as with two replicas
UNEQUAL = ["--vtp-ep-list", "1,2", "--vtp-etp-list", "1,1"]


def router_losses(runs: Sequence[ScriptRun]) -> dict[str, list[float]]:
    """Give the losses of the routers as they were logged, by their name."""
    (output,) = [run.output for run in runs if "lm loss:" in run.output]
    found: dict[str, list[float]] = {}
    for name, value in re.findall(r"(load_balancing_loss|z_loss): (\S+)", output):
        found.setdefault(name, []).append(float(value))
    assert len(found) == 2, output
    return found


@pytest.fixture(scope="module")
def start(script_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScriptRun]]:
    """Give a checkpoint after one step, for all start weights depend on sizes, and a uniform run that goes on."""
    folder = tmp_path_factory.mktemp("experts")
    extra = [word for word in EXPERTS if word != "--sequence-parallel"]
    extra += ["--expert-model-parallel-size", "2", *DISTRIBUTED]
    train(script_pool, "1,1", [*extra, "--save", str(folder), "--save-interval", "1", "--exit-interval", "1"], dp=2)
    return folder, train(script_pool, "1,1", [*extra, "--load", str(folder)], dp=2)


def test_logged_router_losses(script_pool: Pool, start: tuple[Path, list[ScriptRun]], tmp_path: Path) -> None:
    """An unequal run goes on from the uniform checkpoint; another list goes on from the unequal one's."""
    folder, reference = start
    saving = ["--load", str(folder), "--save", str(tmp_path), "--save-interval", "1"]
    runs = train(script_pool, "1,2", [*EXPERTS, *UNEQUAL, *DISTRIBUTED, *BATCH, *saving])
    assert_same_training(runs, reference)
    wanted = router_losses(reference)
    for name, values in router_losses(runs).items():
        assert len(values) == 3 and values == pytest.approx(wanted[name], rel=1e-5), name
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    other = ["--vtp-ep-list", "2,1", "--vtp-etp-list", "1,1"]
    again = train(script_pool, "2,1", [*EXPERTS, *other, *DISTRIBUTED, *BATCH, "--load", str(tmp_path)])
    assert_same_training(again, reference, first=1)


def test_an_optimizer_without_experts_of_its_own_is_refused(
    script_pool: Pool, start: tuple[Path, list[ScriptRun]]
) -> None:
    """Megatron gives experts an optimizer of their own in some layouts only, and one cannot load the other."""
    command = arguments("1,2", extra=[*EXPERTS, *DISTRIBUTED, *BATCH, "--load", str(start[0])])
    runs = launch(script_pool, num_ranks("1,2"), {"arguments": command})
    assert_refused(runs, "--vtp-ep-list 2,2 --vtp-etp-list 1,1", "--vtp-size-list 1,2 is asked for", "--no-load-optim")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--vtp-ep-list", "1,4"), ("expert sizes tp 2 * ep 4 = 8 do not divide", "of stage 1")),
        (
            ("--num-experts", "5", *UNEQUAL),
            ("--num-experts 5; stage 1 has expert-parallel size 2, which must divide it; use 4 or 6",),
        ),
        (("--no-sequence-parallel",), ("stage 1 has tensor-parallel size 2", "add --sequence-parallel")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else str(value),
)
def test_experts_that_do_not_fit_are_refused(script_pool: Pool, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    extra = [*EXPERTS, *flags]
    if flags[0] == "--no-sequence-parallel":
        extra = [word for word in EXPERTS if word != "--sequence-parallel"]
    assert_refused(launch(script_pool, num_ranks("1,2"), {"arguments": arguments("1,2", extra=extra)}), *words)
