"""Arguments and results of runs of a training script; no torch, so that the tests import it for nothing."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.devices import DEVICE
from tests.support.hosts import example_script, norm_tolerance, ramps_up, stock_flags, vocab_size
from tests.support.lines import error_line
from tests.support.pool import TIMEOUT_S, Pool

EXAMPLE = example_script()
JOB = "tests.multiproc.jobs.script_job:run_script"
TOLERANCE = 1e-5

VOCAB = vocab_size()
# 12 heads divide by 1, 2, 3 and 4. The distributed optimizer's checkpoints fail in Megatron itself when the last
# parameter of a bucket is no multiple of 64. One log line per step, no evaluation, no processes that load data.
_OPTIONS = {
    "--num-layers": "4",
    "--hidden-size": "64",
    "--ffn-hidden-size": "192",
    "--num-attention-heads": "12",
    "--kv-channels": "4",
    "--seq-length": "12",
    "--max-position-embeddings": "12",
    "--micro-batch-size": "2",
    "--lr": "3e-3",
    "--min-lr": "3e-4",
    "--clip-grad": "0.5",
    "--log-interval": "1",
    "--eval-interval": "1000",
    "--eval-iters": "0",
    "--mock-data": "",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": str(VOCAB),
    "--num-workers": "0",
    "--transformer-impl": "local",
    "--attention-dropout": "0",
    "--hidden-dropout": "0",
    "--use-cpu-initialization": "",
    "--no-gradient-accumulation-fusion": "",
    "--no-persist-layer-norm": "",
}
MODEL = [word for option in _OPTIONS.items() for word in option if word]
VOCAB_MULTIPLE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What Megatron's ``train_step`` returned.

    Attributes:
        loss: mean over the global batch; None except on the last stage.
        grad_norm: before clipping.
        num_zeros: zero gradients; None unless they are counted.
    """

    loss: float | None
    grad_norm: float
    num_zeros: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRun:
    """How the process of one rank went.

    Attributes:
        exit_code: None when it was still running at the end of its time; its stacks are then in ``output``.
        output: what it printed, both streams.
        steps: of this run, in order.
        evaluations: loss of every evaluation; empty except on the last stage.
        facts: what the test's hooks noted.
    """

    exit_code: int | None
    output: str
    steps: list[Step] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


def arguments(sizes: str, *, dp: int = 1, extra: Sequence[str] = (), device: str = DEVICE) -> list[str]:
    """Give the command line of a run that pads the vocabulary as every other run here does.

    >>> " ".join(arguments("1,2", extra=["--save", "x"])[-8:])
    '--train-iters 4 --vtp-device cpu --vtp-size-list 1,2 --save x'
    """
    ends = [int(size) for size in (sizes.split(",")[0], sizes.split(",")[-1])]
    return [
        *MODEL,
        *("--make-vocab-size-divisible-by", str(VOCAB_MULTIPLE // math.lcm(*ends))),
        *("--global-batch-size", str(8 * dp)),
        *("--train-iters", "4"),
        *("--vtp-device", device),
        *("--vtp-size-list", sizes),
        *(
            stock_flags()
            if len(set(sizes.split(","))) == 1 and "--layerwise-disaggregated-training" not in extra
            else ()
        ),
        *extra,
    ]


GROWN = [4, 4, 8, 12]
"""Samples of the steps of :func:`growing`."""


def growing(command: Sequence[str]) -> list[str]:
    """Give a command line of which the steps have :data:`GROWN` samples, by the flags that make batches grow."""
    ended = {command.index(name) for name in ("--train-iters", "--global-batch-size")}
    words = [word for place, word in enumerate(command) if not {place, place - 1} & ended]
    if ramps_up():
        flags = ["--rampup-batch-size", "4", "4", "16", "--global-batch-size", "12"]
    else:
        flags = ["--step-batch-size-schedule", "0:4 96:8,0.192K:12"]  # behind so many tokens
    return [*words, "--train-samples", str(sum(GROWN)), *flags]


def num_ranks(sizes: str, dp: int = 1) -> int:
    """Give the world size of a list.

    >>> num_ranks("1,2", dp=2)
    6
    """
    return dp * sum(int(size) for size in sizes.split(","))


def uniform(sizes: str) -> str:
    """Give the uniform list with as many stages and one rank each.

    >>> uniform("2,3,1")
    '1,1,1'
    """
    return ",".join("1" for _ in sizes.split(","))


def train(pool: Pool, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, **options: Any) -> list[ScriptRun]:
    """Run the example on a list and return how every rank went; a failure of any rank is the test's."""
    kwargs = {"arguments": arguments(sizes, dp=dp, extra=extra), **options}
    return succeeded(launch(pool, num_ranks(sizes, dp), kwargs))


def launch(
    pool: Pool, world_size: int, kwargs: dict[str, Any], node_sizes: Sequence[int] | None = None
) -> list[ScriptRun]:
    """Run a script on all ranks of a world, whatever comes of it."""
    if DEVICE == "cuda" and "--sequence-parallel" in kwargs["arguments"] and not importlib.util.find_spec("apex"):
        pytest.skip("Megatron's torch LayerNorm has no sequence parallelism on a GPU; the local layers need Apex there")
    limit_s = kwargs.setdefault("timeout_s", TIMEOUT_S)
    return pool.run(world_size, JOB, kwargs, timeout_s=limit_s + 30.0, node_sizes=node_sizes)


def succeeded(runs: list[ScriptRun]) -> list[ScriptRun]:
    """Check that every rank ended well."""
    for rank, run in enumerate(runs):
        assert run.exit_code == 0, f"rank {rank} ended with {run.exit_code}:\n{run.output[-6000:]}"
    return runs


class Scripts(Pool):
    """Workers that do nothing but fork scripts."""

    def train(self, sizes: str, extra: Sequence[str] = (), **options: Any) -> list[ScriptRun]:
        """Run the example on a list, see :func:`train`."""
        return train(self, sizes, extra, **options)

    def launch(self, world_size: int, command: dict[str, Any], **options: Any) -> list[ScriptRun]:
        """Run a script, see :func:`launch`."""
        return launch(self, world_size, command, **options)

    def finish(self, world_size: int, command: dict[str, Any], **options: Any) -> list[ScriptRun]:
        """Run a script; a failure of any rank is the test's."""
        return succeeded(self.launch(world_size, command, **options))


def losses(runs: Sequence[ScriptRun]) -> list[float]:
    """Give the loss of every step, as all ranks of the last stage saw it."""
    seen = [[step.loss for step in run.steps] for run in runs if run.steps[0].loss is not None]
    assert seen and all(row == seen[0] for row in seen), seen
    return [loss for loss in seen[0] if loss is not None]


def grad_norms(runs: Sequence[ScriptRun]) -> list[float]:
    """Give the gradient norm of every step, which all ranks must have found alike."""
    seen = [[step.grad_norm for step in run.steps] for run in runs]
    assert all(row == seen[0] for row in seen), seen
    return seen[0]


def evaluations(runs: Sequence[ScriptRun]) -> list[float]:
    """Give the loss of every evaluation, as the last rank saw it."""
    return runs[-1].evaluations


def assert_same_training(
    runs: Sequence[ScriptRun], reference: Sequence[ScriptRun], *, first: int = 0, tolerance: float = TOLERANCE
) -> None:
    """Check losses and gradient norms of all steps against those of a reference from step ``first`` on."""
    for name, values in (("loss", losses), ("grad norm", grad_norms)):
        got, wanted = values(runs), values(reference)[first:]
        assert len(got) == len(wanted) > 0, (name, got, wanted)
        if name == "grad norm" and tolerance == TOLERANCE:
            tolerance = norm_tolerance()
        for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
            assert abs(a - b) <= tolerance * abs(b), f"{name} of step {step}: {a}, reference {b}; all: {got}, {wanted}"


def assert_refused(runs: Sequence[ScriptRun], *words: str) -> None:
    """Check that every rank ended by itself, not well, and that its error line gives the reason that all ranks give."""
    codes = [run.exit_code for run in runs]
    assert all(code not in (0, None) for code in codes), (codes, [run.output[-3000:] for run in runs])
    assert not any("Traceback" in run.output for run in runs), [run.output[-3000:] for run in runs]
    lines = [error_line(run.output) for run in runs]
    assert all(lines), [run.output[-3000:] for run in runs]
    # Behind our reason stands what this rank was doing; before it, who said it first, where this rank was slow.
    pattern = r"^(?:\[vtp(?: rank \d+)?\]|vtp_plugin:) error: (?:rank \d+ failed: )?(.*?)(; this rank .*)?$"
    reasons = {re.sub(pattern, r"\1", line) for line in lines}
    assert len(reasons) == 1, lines
    (reason,) = reasons
    for word in words:
        assert word in reason, (word, reason)
