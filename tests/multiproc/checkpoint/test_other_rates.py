"""A resume with other rates goes on with the moments that are stored, in every form of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multiproc.cases.other_rates import OTHER, OTHER_DECOUPLED, flags
from tests.multiproc.cases.saved_runs import SavedRuns, resume
from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    assert_same_training,
    num_ranks,
    succeeded,
)
from tests.multiproc.checkpoint.test_moved_optimizer import (
    DISTRIBUTED,
    EXPERTS,
    EXPERTS_1_2,
    EXPERTS_2_1,
    TIED_APART,
    U_SHAPE,
)
from tests.support.hosts import is_older, reshardable_flags, resharding_flags, resume_tolerance

pytestmark = [pytest.mark.needs("scripts_here")]
OVERRIDE, STORED = "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"
APART = ["--untie-embeddings-and-output-weights", "--decoupled-lr", "1e-3", "--decoupled-min-lr", "5e-4"]
BATCH = ["--global-batch-size", "16"]
RESHARDABLE = [*DISTRIBUTED, *reshardable_flags()]


@dataclass(frozen=True, kw_only=True)
class OtherRates:
    """A resume with other rates, and the run that it goes on from.

    Attributes:
        source: list of the writer.
        target: list of the reader.
        dp: replicas of both, and of the run to compare with.
        model: flags of all runs.
        wrote: flags of the writer's layout.
        reads: flags of the reader's layout.
        hooks: of all runs.
        is_compared_apart: the run to compare with has the writer's layout, on which start weights depend.
    """

    source: str
    target: str
    dp: int = 1
    model: tuple[str, ...] = ()
    wrote: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    is_compared_apart: bool = False

    @property
    def other(self) -> list[str]:
        """Flags of the reader's rates."""
        return flags({**OTHER, **(OTHER_DECOUPLED if "--decoupled-lr" in self.model else {})})


def _case(name: str, source: str, target: str, *flags: str, is_full: bool = True, **values: Any) -> Any:
    case = OtherRates(source=source, target=target, model=flags, **values)
    return pytest.param(case, id=name, marks=[pytest.mark.full] if is_full else [])


@pytest.mark.parametrize(
    "case",
    [
        _case("by-bucket", "1,2", "2,1", *DISTRIBUTED, *APART, dp=2, is_full=False),
        _case("by-bucket-tied", "1,2", "2,1", *DISTRIBUTED, dp=2),
        _case("by-bucket-same-list", "1,2", "1,2", *DISTRIBUTED, *APART, dp=2),
        _case("by-bucket-from-uniform", "1,1", "1,2", *DISTRIBUTED, *TIED_APART, dp=2),
        _case("by-bucket-to-uniform", "1,2", "2,2", *DISTRIBUTED, *TIED_APART),
        _case("plain", "1,2", "1,2", is_full=False),
        _case("plain-moved", "1,1", "2,1", *APART),
        _case("reshardable", "1,2", "2,1", *RESHARDABLE, *APART, dp=2),
        _case("reshardable-from-uniform", "1,1", "1,2", *RESHARDABLE),
        _case("half", "1,2", "2,1", "--bf16", *APART),
        _case("fp16", "1,2", "1,2", "--fp16", "--initial-loss-scale", "1024"),
        _case("half-distributed", "1,2", "2,1", "--bf16", *DISTRIBUTED),
        _case("sgd", "1,2", "2,1", "--optimizer", "sgd", "--sgd-momentum", "0.5"),
        _case("legacy", "1,2", "1,2", "--ckpt-format", "torch", *APART),
        _case("legacy-distributed", "1,2", "1,2", "--ckpt-format", "torch", *DISTRIBUTED, *TIED_APART, dp=2),
        _case("u-shape", "1,2,2", "2,1", *DISTRIBUTED, wrote=tuple(U_SHAPE), is_compared_apart=True),
        _case("to-u-shape", "1,2", "1,2,2", reads=tuple(U_SHAPE)),
        _case(
            "experts",
            *("1,2", "2,1", *EXPERTS, *APART),
            wrote=tuple(EXPERTS_1_2),
            reads=tuple(EXPERTS_2_1),
            is_compared_apart=True,
        ),
        _case(
            "experts-distributed",
            *("1,2", "2,1", *DISTRIBUTED, *EXPERTS, *APART),
            wrote=tuple(EXPERTS_1_2),
            reads=tuple(EXPERTS_2_1),
            is_compared_apart=True,
            dp=2,
        ),
    ],
)
def test_other_rates(scripts: Scripts, saved_runs: SavedRuns, case: OtherRates) -> None:
    """The next steps are those of a run whose rates were set by hand."""
    folder, _ = saved_runs(case.source, [*case.model, *case.wrote], dp=case.dp, hooks=case.hooks)
    sizes, wrote, dp = (case.source, case.wrote, case.dp) if case.is_compared_apart else ("1,1", (), 1)
    wanted = scripts.train(sizes, [*case.model, *wrote, *BATCH], dp=dp, hooks=["set_rates", *case.hooks])
    extra = [*case.model, *case.reads, *case.other, OVERRIDE]
    runs = resume(scripts, folder, case.target, extra, dp=case.dp, hooks=case.hooks)
    tolerance = 2e-2 if "--bf16" in case.model or "--fp16" in case.model else resume_tolerance()
    assert_same_training(runs, wanted, first=2, tolerance=tolerance)


def _resumed(scripts: Scripts, folder: Path, sizes: str, extra: Sequence[str], *, dp: int = 1) -> list[ScriptRun]:
    """Resume, whatever comes of it."""
    command = arguments(sizes, dp=dp, extra=[*extra, *resharding_flags(), *BATCH, "--load", str(folder)])
    return scripts.launch(num_ranks(sizes, dp), {"arguments": command, "hooks": ["note_rates"]})


@pytest.mark.full
@pytest.mark.needs("groups_by_rates")
@pytest.mark.parametrize("model", [[], DISTRIBUTED, RESHARDABLE, ["--bf16"]], ids=["plain", "bucket", "whole", "half"])
@pytest.mark.parametrize("given", [[], [OVERRIDE], [STORED]], ids=["neither", "override", "stored"])
def test_a_uniform_list_that_megatron_cannot_resume_ends_in_one_line(
    scripts: Scripts, saved_runs: SavedRuns, model: list[str], given: list[str]
) -> None:
    folder, _ = saved_runs("1,1", [*model, *TIED_APART])
    runs = _resumed(scripts, folder, "1,1", [*model, *TIED_APART, *flags(OTHER), *given])
    assert_refused(runs, "this run has max_lr 0.001, in the checkpoint 0.003; ", "give those, load only the weights")


@pytest.mark.parametrize(
    ("target", "model"),
    [
        pytest.param("2,1", [*DISTRIBUTED, *TIED_APART], id="bucket"),
        pytest.param("1,2", TIED_APART, id="plain", marks=pytest.mark.full),
        pytest.param("2,1", [*RESHARDABLE, *TIED_APART], id="whole", marks=pytest.mark.full),
    ],
)
def test_whose_rates_count_is_said(scripts: Scripts, saved_runs: SavedRuns, target: str, model: list[str]) -> None:
    """With neither flag a line names both; with the checkpoint's rates the run goes on as it would have."""
    folder, whole = saved_runs("1,2", model)
    other = [*model, *flags({name: OTHER[name] for name in ("lr", "min_lr")})]
    if not is_older():
        lines = (
            "this run has max_lr 0.001, in the checkpoint 0.003; ",
            f"give {OVERRIDE} to train",
            f"or {STORED} to keep the checkpoint's",
        )
        assert_refused(_resumed(scripts, folder, target, other), *lines)
    runs = succeeded(_resumed(scripts, folder, target, [*other, STORED]))
    assert_same_training(runs, whole, first=2, tolerance=resume_tolerance())


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "ends"),
    [
        pytest.param([], "", id="plain"),
        pytest.param(DISTRIBUTED, "", id="bucket"),
        pytest.param(RESHARDABLE, "", id="whole"),
        pytest.param(
            ["--ckpt-format", "torch"], "of other sizes; --ckpt-format torch loads into the same", id="legacy"
        ),
    ],
)
def test_rates_of_their_own_come_with_a_resume(
    scripts: Scripts, saved_runs: SavedRuns, model: list[str], ends: str
) -> None:
    """The embedding and the output layer get their own, or lose them: other groups of parameters hold them."""
    model = [*model, *TIED_APART]
    folder, _ = saved_runs("1,2", model)
    apart = [*model, *flags({**OTHER, **OTHER_DECOUPLED})]
    runs = _resumed(scripts, folder, "1,2", [*apart, OVERRIDE])
    if ends:
        return assert_refused(runs, ends)
    alike = ["--decoupled-lr", "3e-3", "--decoupled-min-lr", "3e-4"]
    wanted = scripts.train("1,1", [*model, *alike, *BATCH], hooks=["set_rates"])
    assert_same_training(succeeded(runs), wanted, first=2, tolerance=resume_tolerance())
    folder, _ = saved_runs("1,2", [*model, *alike])
    same = flags({"decoupled_lr": OTHER["lr"], "decoupled_min_lr": OTHER["min_lr"]})
    for target in ("1,2", "2,1"):
        lost, kept = (
            _resumed(scripts, folder, target, [*model, *flags(OTHER), OVERRIDE, *more]) for more in ([], same)
        )
        assert_same_training(succeeded(lost), succeeded(kept), tolerance=resume_tolerance())
