"""Runs that are killed while they save: one trial, and what must be true of what it leaves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.multiproc.cases.script_cases import JOB, ScriptRun, arguments, losses, succeeded
from tests.multiproc.hooks.kill_hooks import CLEARING, OF_CLAIMS, OF_INDEX, OF_PIECES, ORDER, REPLACED, SHARED
from tests.support.hosts import background_flags, exact_resume_tolerance, host_name
from tests.support.pool import Pool
from vtp_plugin.checkpoint.format.checkpoint_files import iterations
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.save.atomic_dir import PARTIAL, problem_of
from vtp_plugin.checkpoint.tools.compare_checkpoints import Comparison
from vtp_plugin.checkpoint.tools.verify import Verification
from vtp_plugin.errors import ConfigError

# With the distributed optimizer Megatron 0.12 takes no tied embedding of these sizes.
_APART = ("--untie-embeddings-and-output-weights",) if host_name() == "0.12" else ()
FORMATS: dict[str, tuple[str, ...]] = {
    "torch_dist": (),
    "torch_dist, distributed optimizer": ("--use-distributed-optimizer", *_APART),
    "torch": ("--ckpt-format", "torch"),
    "background": background_flags(),
}
SIZES, NUM_RANKS, NUM_STEPS = "1,2", 3, 4
_LEFT = "left_before"  # a file in folders that stopped saves have left
OF_WORKERS = "half a shard, its rank"
"""The point at which a process in the background writes, and its rank is killed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run.

    Attributes:
        form: a key of :data:`FORMATS`.
        point: where it is killed.
        save: while it saves this iteration.
        rank: that comes to the point; None for any.
        victim: the rank that is killed; None for the process that comes to the point.
        start: the iteration that it goes on from; 0 if it begins.
        mutant: what is wrong with how it saves, in a control.
        is_lost: whether the tracker is missing when the run begins.
    """

    form: str
    point: str
    save: int = 2
    rank: int | None = None
    victim: int | None = None
    start: int = 0
    mutant: str = ""
    is_lost: bool = False

    @property
    def most(self) -> float:
        """By how much of the largest value a tensor may differ: Megatron 0.12 does not resume to the last bit itself.

        Moments of two iterations differ by more.
        """
        return 1e-2 if self.start and exact_resume_tolerance() else 0.0

    def allowed(self) -> list[int]:
        """Give the iterations that the tracker may name afterwards; 0 if it may be missing."""
        # A run that found another one than the tracker names leaves the tracker as it is until it saves.
        return [0 if number == self.start and self.is_lost else number for number in self._named()]

    def _named(self) -> range:
        if self.point in ("after tracker", "clean-up"):
            return range(self.save, self.save + 1)
        is_of_pieces = self.point in OF_PIECES
        # Earlier ones may still have been on their way.
        first = self.start if self.form == "background" and is_of_pieces else self.save - 1
        # Whoever publishes may have gone on for a moment, if another one was killed.
        is_over = self.victim is not None and not is_of_pieces
        return range(first, self.save + 1 if is_over else self.save)


def points_of(form: str) -> tuple[str, ...]:
    """Give the points that a save comes to."""
    of_form = {"torch": OF_CLAIMS, "background": (*OF_INDEX, OF_WORKERS)}.get(form, OF_INDEX)
    return (CLEARING, *OF_PIECES, *of_form, *SHARED, REPLACED)


def train(
    pool: Pool,
    folder: Path,
    form: str,
    extra: Sequence[str] = (),
    trial: Trial | None = None,
    *,
    act: str = "",
    hooks: Sequence[str] = (),
) -> list[ScriptRun]:
    """Train four steps, and save after each."""
    words = [*FORMATS[form], "--save", str(folder), "--save-interval", "1", *extra]
    order = {} if trial is None else asdict(trial)
    order["act"] = act
    order["log"] = str(folder.with_suffix(".log"))
    kwargs: dict[str, Any] = {"arguments": arguments(SIZES, extra=words), "timeout_s": 120.0}
    if trial is not None:
        kwargs["hooks"] = ["kill_in_save", *hooks]
    return pool.run(NUM_RANKS, JOB, kwargs, timeout_s=150.0, env={ORDER: json.dumps(order)})


def run_trial(pool: Pool, folder: Path, trial: Trial, reference: Path, extra: Sequence[str] = ()) -> Iterator[str]:
    """Kill a run, and say what is wrong with what it leaves: nothing, if all is well."""
    keep = ["--vtp-keep-checkpoints", "1"] if trial.point == "clean-up" else []
    _prepare(folder, trial, reference)
    for partial in folder.glob(f"{PARTIAL}*"):
        if partial.is_dir():
            (partial / _LEFT).touch()
    runs = train(pool, folder, trial.form, [*keep, *extra], trial)
    log = folder.with_suffix(".log")
    struck = json.loads(log.read_text()) if log.exists() else None
    meant: dict[str, Any] = {"point": trial.point, "iteration": trial.save}
    if trial.form == "background":  # elsewhere Megatron up to 0.16 writes some files by processes of their own
        meant["is_in_worker"] = trial.point in OF_PIECES
    if struck is None or struck | meant != struck:
        yield f"was not struck as it was meant: {struck}; {_end_of(runs)}"
    if any(run.exit_code == 0 for run in runs):
        yield f"ranks ended well: {[run.exit_code for run in runs]}"
    if late := [rank for rank, run in enumerate(runs) if run.exit_code is None]:
        yield f"ranks {late} did not end: {_end_of(runs)}"
    if trial.point != CLEARING and (still := [*folder.glob(f"*/{_LEFT}")]):
        yield f"what was left before is still there: {still}"
    yield from judge(folder, trial, reference)


def _prepare(folder: Path, trial: Trial, reference: Path) -> None:
    """Put there what the point needs, and forget the trial before."""
    for log in folder.parent.glob(f"{folder.name}.log*"):
        log.unlink()
    if trial.point == CLEARING:
        shutil.copytree(reference / f"iter_{1:07d}", folder / f"{PARTIAL}iter_{1:07d}", dirs_exist_ok=True)
    if trial.point == REPLACED:
        shutil.copytree(reference / f"iter_{trial.save:07d}", folder / f"iter_{trial.save:07d}", dirs_exist_ok=True)


def _end_of(runs: Sequence[ScriptRun]) -> str:
    return " | ".join(f"{run.exit_code}: {run.output[-1500:]}" for run in runs)


def judge(folder: Path, trial: Trial, reference: Path) -> Iterator[str]:
    """Look at a folder of checkpoints from outside, without a word of the run's."""
    tracker = folder / TRACKER
    text = tracker.read_text() if tracker.exists() else "0"
    if not text.isdecimal() or int(text) not in trial.allowed():
        yield f"the tracker says {text!r}, not one of {trial.allowed()}"
    for checkpoint in sorted(folder.glob("iter_*")):
        if (problem := problem_of(checkpoint)) is not None:
            yield problem
        elif not is_same(checkpoint, reference / checkpoint.name, most=trial.most):
            yield f"{checkpoint} is another state than that of the run that was not killed"
    for partial in sorted(folder.glob(f"{PARTIAL}iter_*")):
        if not _names_a_problem(partial) and not is_same(
            partial, reference / partial.name.removeprefix(PARTIAL), most=trial.most
        ):
            yield f"`verify` finds nothing wrong in {partial}, and it is not what was saved"
    if text.isdecimal() and int(text) and not (folder / f"iter_{int(text):07d}").is_dir():
        yield f"the tracker says {text}, which is not there"


def _names_a_problem(folder: Path) -> bool:
    try:
        return any(str(folder) in problem for problem in Verification(folder).problems(lambda _: None))
    except ConfigError as error:
        return str(folder) in str(error)


def is_same(one: Path, other: Path, most: float = 0.0) -> bool:
    """Tell whether two checkpoints hold the same weights and states of the optimizer, to the last bit.

    Args:
        one: a checkpoint.
        other: another one.
        most: by how much of the largest value two tensors may differ nevertheless.
    """
    files = sorted(one.glob("mp_rank_*/*.pt"))
    if not files:
        a, b = Contents(one), Contents(other)
        found = Comparison(a, b, is_weights_only=False)
        return a.steps() == b.steps() and all(
            each.is_equal or (not each.problem and each.relative <= most) for each in found
        )
    return all(_equal(_load(file), _load(other / file.relative_to(one))) for file in files)


def _load(file: Path) -> Any:
    state = torch.load(file, map_location="cpu", weights_only=False)
    return {key: value for key, value in state.items() if key.startswith("model") or key == "optimizer"}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def found(folder: Path) -> tuple[int, bool]:
    """Say from which iteration a run goes on, and whether the tracker is missing, so that it must be told to search."""
    tracker = folder / TRACKER
    if tracker.exists():
        return int(tracker.read_text()), False
    there = iterations(folder)
    return (there[-1], True) if there else (0, False)


def resume(pool: Pool, folder: Path, trial: Trial, whole: Sequence[float]) -> Iterator[str]:
    """Go on with what a killed run has left, and compare the losses with those of one that was not killed."""
    step = int((folder / TRACKER).read_text())
    if step == NUM_STEPS:
        yield "it was not killed"
        return
    runs = succeeded(train(pool, folder, trial.form, ["--load", str(folder)]))
    if losses(runs) != list(whole[step:]):
        yield f"goes on from step {step} with {losses(runs)}, not {whole[step:]}"
    left = [path.name for path in folder.iterdir() if path.name.startswith("partial_")]
    if left:
        yield f"what was left is still there: {left}"
