"""Options of training from a checkpoint, across a resume into another list: as the uniform run that does it.

A run on ``1,2`` saves after its second step and goes on on ``2,1``; one on ``1,1`` goes on on ``1,1``. Losses, norms,
rates, decay of weights and samples are compared step by step. ``make test`` runs a few cases, ``make test-full`` all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    arguments,
    assert_same_training,
    evaluations,
    launch,
    num_ranks,
    succeeded,
)
from tests.support.hosts import resharding_flags, resume_tolerance
from tests.support.pool import Pool

pytestmark = pytest.mark.needs("scripts_here")
OVERRIDE, STORED = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
SAMPLES = "--train-samples 64"
APART = "--untie-embeddings-and-output-weights --decoupled-lr 1e-3 --decoupled-min-lr 5e-4"
_WEIGHTS_ONLY = ("--no-load-optim", "--finetune", "--pretrained-checkpoint")
Key = tuple[str, str]


@pytest.fixture(scope="module")
def pool(script_pool: Pool) -> Pool:
    """Workers for scripts."""
    return script_pool


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Flags of a run that saves, and of the one that goes on.

    Attributes:
        both: flags of both.
        wrote: of the writer alone.
        reads: of the reader alone.
        loads: flag that names the folder to the reader.
        num_steps: steps of the reader.
    """

    both: str = ""
    wrote: str = ""
    reads: str = ""
    loads: str = "--load"
    num_steps: int = 2


def _case(name: str, both: str = "", *, is_full: bool = True, **values: Any) -> Any:
    return pytest.param(Resumed(both=both, **values), id=name, marks=[pytest.mark.full] if is_full else [])


class Written:
    """Folders in which runs have saved after their second step; each is made once."""

    def __init__(self, pool: Pool, factory: pytest.TempPathFactory) -> None:
        self._pool, self._factory = pool, factory
        self._known: dict[Key, Path] = {}

    def __call__(self, sizes: str, flags: str) -> Path:
        """Return the folder of a list and flags."""
        if (sizes, flags) not in self._known:
            folder = self._factory.mktemp("written")
            saving = ["--save", str(folder), "--save-interval", "2"]
            _train(self._pool, sizes, ["--exit-interval", "2", *flags.split(), *saving])
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            self._known[sizes, flags] = folder
        return self._known[sizes, flags]


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Runs that have saved."""
    return Written(pool, tmp_path_factory)


def _train(pool: Pool, sizes: str, extra: Sequence[str]) -> list[ScriptRun]:
    """Train, by samples where the flags say so."""
    command = arguments(sizes, extra=["--global-batch-size", "16", *extra])
    if "--train-samples" in extra:
        place = command.index("--train-iters")
        del command[place : place + 2]
    return succeeded(launch(pool, num_ranks(sizes), {"arguments": command, "hooks": ["note_rates"]}))


def _resume(pool: Pool, written: Written, case: Resumed, source: str, target: str) -> list[ScriptRun]:
    folder = written(source, f"{case.both} {case.wrote}".strip())
    words = f"{case.both} {case.reads} {case.loads}".split()
    return _train(pool, target, [*resharding_flags(), *words, str(folder)])


@pytest.mark.parametrize(
    "case",
    [
        # Rates by samples, another decay and another batch at the resume.
        _case(
            "samples",
            f"{SAMPLES} --lr-decay-samples 64 --lr-warmup-samples 16 --lr-warmup-init 1e-5",
            reads="--global-batch-size 8",
            num_steps=6,
        ),
        _case(
            "overridden",
            "--lr-warmup-iters 1",
            reads=f"{OVERRIDE} --lr-decay-style cosine --lr-decay-iters 8 --lr-warmup-iters 2 --weight-decay 0.3",
            is_full=False,
        ),
        _case("cosine", "--lr-decay-style cosine --lr-decay-iters 8 --lr-warmup-iters 1"),
        _case("constant", "--lr-decay-style constant --lr-warmup-fraction 0.75"),
        _case("inverse-square-root", "--lr-decay-style inverse-square-root --lr-warmup-iters 1"),
        *(
            _case(f"wsd-{style}", f"--lr-decay-style WSD --lr-wsd-decay-iters 3 --lr-wsd-decay-style {style}")
            for style in ("exponential", "linear", "cosine", "minus_sqrt")
        ),
        _case(
            "wsd-samples",
            f"{SAMPLES} --lr-decay-style WSD --lr-decay-samples 64 --lr-wsd-decay-samples 48",
            is_full=False,
        ),
        _case("weight-decay", "--start-weight-decay 0.1 --end-weight-decay 0.4 --weight-decay-incr-style linear"),
        _case(
            "weight-decay-cosine", "--start-weight-decay 0.1 --end-weight-decay 0.4 --weight-decay-incr-style cosine"
        ),
        _case("decoupled", APART),
        _case("stored", "--lr-decay-iters 8", reads=f"{STORED} --lr-decay-iters 12 --lr-decay-style cosine"),
        _case("stored-decay", "--weight-decay 0.1", reads=f"{STORED} --weight-decay 0.4"),
        _case(
            "overridden-decay",
            reads=f"{OVERRIDE} --start-weight-decay 0.1 --end-weight-decay 0.3 --weight-decay-incr-style linear",
        ),
        _case("more-samples", f"{SAMPLES} --lr-decay-samples 64", reads=f"--train-samples 96 {OVERRIDE}", num_steps=4),
        _case("ramp-up", f"{SAMPLES} --rampup-batch-size 8 4 32 --lr-decay-samples 64"),
        _case("no-load-optim", reads="--no-load-optim"),
        _case("no-load-rng", reads="--no-load-rng"),
        _case("no-save-optim", wrote="--no-save-optim", reads="--no-load-optim"),
        _case("no-save-rng", wrote="--no-save-rng", reads="--no-load-rng"),
        _case("finetune", reads="--finetune", num_steps=4),
        _case("pretrained", loads="--pretrained-checkpoint", num_steps=4),
        _case("step", "--train-iters 6", wrote="--exit-interval 4", reads="--ckpt-step 4"),
        _case("exit-interval", reads="--exit-interval 3", num_steps=1),
        _case("missing", reads="--exit-on-missing-checkpoint"),
        _case("evaluation", "--eval-interval 1 --eval-iters 2 --start-eval-at-iter 3"),
        _case("skip-train", reads="--skip-train --eval-iters 2", num_steps=0),
        _case("skipped", reads="--iterations-to-skip 3", num_steps=1),
        _case("half", "--bf16 --use-distributed-optimizer", reads="--no-load-optim --load-main-params-from-ckpt"),
        _case("distributed", f"--use-distributed-optimizer {APART}", reads=f"{OVERRIDE} --lr-decay-iters 8"),
    ],
)
def test_an_option_across_a_resume(pool: Pool, written: Written, case: Resumed) -> None:
    """Steps, rates and samples of the resumed run are those of the uniform one that does the same."""
    wanted = _resume(pool, written, case, "1,1", "1,1")
    runs = _resume(pool, written, case, "1,2", "2,1")
    assert [len(run.steps) for run in (*runs, *wanted)] == [case.num_steps] * (len(runs) + len(wanted))
    if case.num_steps:
        # Without its moments Adam makes more of rounding in the first step.
        is_fresh = any(flag in f"{case.reads} {case.loads}" for flag in _WEIGHTS_ONLY)
        tolerance = 5e-5 if is_fresh else resume_tolerance()
        assert_same_training(runs, wanted, tolerance=2e-2 if "--bf16" in case.both else tolerance)
    assert runs[0].facts["rates"] == wanted[0].facts["rates"], (runs[0].facts["rates"], wanted[0].facts["rates"])
    for a, b in zip(evaluations(runs), evaluations(wanted), strict=True):
        assert abs(a - b) <= resume_tolerance() * b, (evaluations(runs), evaluations(wanted))
    assert bool(evaluations(wanted)) == ("--eval-iters" in f"{case.both} {case.reads}")
