"""Runs that save their optimizer after two of four steps, and runs that go on from there in another layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.multiproc.cases.script_cases import ScriptRun, arguments, launch, num_ranks, succeeded, train
from tests.support.hosts import resharding_flags
from tests.support.pool import Pool

_BATCH = ("--global-batch-size", "16")


class SavedRuns:
    """Runs of four steps that save after the second one; each is made once.

    Args:
        pool: workers for scripts.
        make_folder: makes a folder for each run.
    """

    def __init__(self, pool: Pool, make_folder: Callable[[str], Path]) -> None:
        self._pool, self._make_folder = pool, make_folder
        self._known: dict[tuple[object, ...], tuple[Path, list[ScriptRun]]] = {}

    def __call__(
        self, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, hooks: Sequence[str] = (), is_stock: bool = False
    ) -> tuple[Path, list[ScriptRun]]:
        """Return the folder that a run has saved in, and what it held after the second step."""
        key = (sizes, tuple(extra), dp, tuple(hooks), is_stock)
        if key not in self._known:
            folder = self._make_folder("written")
            saving = [*extra, *_BATCH, "--save", str(folder), "--save-interval", "2"]
            run = train_stock if is_stock else train
            runs = run(self._pool, sizes, saving, dp=dp, hooks=["dump_optimizer", *hooks])
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
            self._known[key] = folder, runs
        return self._known[key]


def resume(
    pool: Pool,
    folder: Path,
    sizes: str,
    extra: Sequence[str] = (),
    *,
    dp: int = 1,
    hooks: Sequence[str] = (),
    is_stock: bool = False,
) -> list[ScriptRun]:
    """Train the last two steps from the checkpoint of the second one, and take the optimizer down before."""
    loading = [*extra, *resharding_flags(), *_BATCH, "--load", str(folder)]
    runs = (train_stock if is_stock else train)(pool, sizes, loading, dp=dp, hooks=["dump_optimizer", *hooks])
    assert "successfully loaded checkpoint" in runs[0].output
    assert [len(run.steps) for run in runs] == [2] * len(runs)
    return runs


def train_stock(
    pool: Pool, sizes: str, extra: Sequence[str] = (), *, dp: int = 1, hooks: Sequence[str] = ()
) -> list[ScriptRun]:
    """Run Megatron without the plugin on a uniform list."""
    command = arguments(sizes, dp=dp, extra=extra)
    position = command.index("--vtp-device")
    tp, pp = sizes.split(",")[0], len(sizes.split(","))
    command[position : position + 4] = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", str(pp)]
    kwargs = {"arguments": command, "how": "stock", "hooks": list(hooks)}
    return succeeded(launch(pool, num_ranks(sizes, dp), kwargs))
