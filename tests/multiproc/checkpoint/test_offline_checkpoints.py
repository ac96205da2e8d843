"""The tools for checkpoints on what real runs have saved: they read what the runs held, in every layout and form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.optimizer_state import assert_same_state
from tests.multiproc.cases.saved_runs import train_stock
from tests.multiproc.cases.script_cases import ScriptRun, Scripts, assert_same_training
from tests.multiproc.cases.stored_state import assert_stored_as_held
from tests.support.hosts import reshardable_flags
from vtp_plugin.checkpoint.format.checkpoint_files import find_checkpoint
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.cli import main

pytestmark = [pytest.mark.needs("scripts_here"), pytest.mark.needs("our_example")]
DISTRIBUTED = ["--use-distributed-optimizer"]
RESHARDABLE = [*DISTRIBUTED, *reshardable_flags()]
UNTIED = ["--untie-embeddings-and-output-weights"]
GATED = ["--swiglu", "--group-query-attention", "--num-query-groups", "6"]


@pytest.fixture(scope="module")
def source(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScriptRun]]:
    """A run that saves after two steps, of unequal stages and two replicas, and what it held then."""
    folder = tmp_path_factory.mktemp("source")
    saving = [*DISTRIBUTED, *GATED, *UNTIED, "--save", str(folder), "--save-interval", "2"]
    runs = scripts.train("1,2", [*saving, "--global-batch-size", "16"], dp=2, hooks=["dump_optimizer"])
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return folder, runs


def save_again(scripts: Scripts, folder: Path, target: Path, sizes: str, extra: Sequence[str], *, dp: int = 1) -> Path:
    """Load a checkpoint in another layout, and save it without a step."""
    flags = [*extra, *GATED, *UNTIED, "--load", str(folder), "--save", str(target), "--save-interval", "3"]
    # No step is left; schedules are those of the first run.
    flags += ["--train-iters", "2", "--use-checkpoint-opt-param-scheduler", "--global-batch-size", "16"]
    scripts.train(sizes, flags, dp=dp)
    return target


def code_of(*words: object) -> int:
    """Run an action, and return its exit code."""
    try:
        main(["checkpoint", *map(str, words)])
    except SystemExit as left:
        assert isinstance(left.code, int)
        return left.code
    return 0


def test_what_is_read_is_what_the_run_held(source: tuple[Path, list[ScriptRun]]) -> None:
    """The oracle took it off the live optimizer, and knows nothing of checkpoints."""
    folder, runs = source
    assert_stored_as_held(Contents(find_checkpoint(folder)), runs)


@pytest.mark.parametrize(
    ("sizes", "extra", "dp"),
    [
        pytest.param("2,1", DISTRIBUTED, 1, id="2,1"),
        pytest.param("2,2", RESHARDABLE, 1, id="2,2-reshardable"),
        pytest.param("1", RESHARDABLE, 2, id="1-reshardable", marks=pytest.mark.full),
        pytest.param("3,1,1,2", DISTRIBUTED, 1, id="3,1,1,2", marks=pytest.mark.full),
    ],
)
def test_what_another_layout_saves_again_is_equal(
    scripts: Scripts, source: tuple[Path, list[ScriptRun]], tmp_path: Path, sizes: str, extra: list[str], dp: int
) -> None:
    other = save_again(scripts, source[0], tmp_path / "other", sizes, extra, dp=dp)
    assert code_of("diff", source[0], other) == 0
    assert code_of("verify", other) == code_of("verify", source[0]) == 0


def test_two_steps_later_nothing_is_equal(
    source: tuple[Path, list[ScriptRun]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = source
    assert code_of("diff", folder / "iter_0000002", folder / "iter_0000004") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "tensors" in line] == [
        f"{state}: 17 tensors, 17 differ" for state in ("weight", "master", "exp_avg", "exp_avg_sq")
    ]
    assert lines[-1] == "steps: 2 in A, 4 in B"


def test_what_is_shown(source: tuple[Path, list[ScriptRun]], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("show", source[0]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("iter_0000002: iteration 2, torch_dist")
    assert lines[2] == "saved with tp 1,2, cp 1,1, dp 2,2, ep 1,1, etp 1,2"
    assert lines[3].startswith("optimizer dp_reshardable, with vtp_optimizer_map.json: any layout loads it; steps 2")


@pytest.fixture(scope="module")
def resharded(source: tuple[Path, list[ScriptRun]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint, as any layout loads it."""
    target = tmp_path_factory.mktemp("resharded")
    assert code_of("reshard", "--from", source[0], "--to", target) == 0
    assert code_of("diff", source[0], target) == code_of("verify", target) == 0
    return target


@pytest.mark.parametrize(
    ("sizes", "dp"), [("2", 1), pytest.param("1,1", 2, marks=pytest.mark.full), ("2,1", 1)], ids=["2", "1,1-dp2", "2,1"]
)
def test_what_was_written_again_goes_on(
    scripts: Scripts, source: tuple[Path, list[ScriptRun]], resharded: Path, sizes: str, dp: int
) -> None:
    """In uniform layouts and others: masters, moments and steps bit by bit, and the next two steps."""
    flags = [*DISTRIBUTED, *GATED, *UNTIED, "--load", str(resharded), "--global-batch-size", "16"]
    runs = scripts.train(sizes, flags, dp=dp, hooks=["dump_optimizer"])
    assert "successfully loaded checkpoint" in runs[0].output
    assert_same_state(runs, source[1])
    assert_same_training(runs, source[1], first=2)


def test_stock_megatron_loads_what_was_written_again(
    scripts: Scripts, source: tuple[Path, list[ScriptRun]], resharded: Path
) -> None:
    """Without the plugin, where it could not load the source."""
    flags = [*DISTRIBUTED, *GATED, *UNTIED, "--load", str(resharded), "--global-batch-size", "16"]
    runs = train_stock(scripts, "1,1", flags)
    assert "successfully loaded checkpoint" in runs[0].output
    assert_same_training(runs, source[1], first=2)
