"""What an audit ran with checkpoints and exits, so that it stays as it is; ``test_audited.py`` has the list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.multiproc.cases.script_cases import ScriptRun, Scripts, arguments, assert_same_training, num_ranks, succeeded
from tests.support.hosts import (
    exact_resume_tolerance,
    reshardable_flags,
    resharding_flags,
    resume_tolerance,
    saves_distributed,
)

pytestmark = [pytest.mark.full, pytest.mark.needs("scripts_here")]

RESHARDABLE = ("--use-distributed-optimizer", *reshardable_flags())
TRACKER = "latest_checkpointed_iteration.txt"


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint, whole."""
    reader = dcp.FileSystemReader(folder)
    found: dict[str, torch.Tensor] = {}
    for name, stored in reader.read_metadata().state_dict_metadata.items():
        if isinstance(stored, dcp.metadata.TensorStorageMetadata):
            found[name] = torch.zeros(stored.size, dtype=stored.properties.dtype)
    dcp.load(found, storage_reader=reader)
    return found


@pytest.mark.parametrize(
    ("sizes", "extra", "num_tensors", "of_weights", "of_states"),
    [
        pytest.param("1,2", ("--optimizer", "sgd", "--lr", "1e-1"), 32, 1e-5, 1e-5, id="sgd"),
        # Adam divides a gradient by its own size, also where that is rounding, as in the biases of keys.
        pytest.param("2,1", (), 48, 1e-3, 1e-4, id="adam"),
    ],
)
def test_weights_and_states_after_four_steps(
    scripts: Scripts,
    tmp_path: Path,
    sizes: str,
    extra: tuple[str, ...],
    num_tensors: int,
    of_weights: float,
    of_states: float,
) -> None:
    """Every weight and every state of the optimizer is that of the uniform run."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    scripts.train(sizes, [*extra, "--save", str(ours), "--save-interval", "4"])
    scripts.train("1,1", [*extra, "--save", str(theirs), "--save-interval", "4"])
    found, wanted = (_tensors(folder / "iter_0000004") for folder in (ours, theirs))
    assert found.keys() == wanted.keys()
    assert len(found) == num_tensors, sorted(found)
    for name, tensor in found.items():
        tolerance = of_states if name.startswith("optimizer.") else of_weights
        apart = float((tensor - wanted[name]).abs().max())
        assert apart <= tolerance * float(wanted[name].abs().max()), (name, apart)


def _start(scripts: Scripts, sizes: str, dp_list: str, extra: Sequence[str], **options: object) -> list[ScriptRun]:
    world = sum(int(tp) * int(dp) for tp, dp in zip(sizes.split(","), dp_list.split(","), strict=True))
    command = arguments(sizes, dp=2, extra=["--vtp-dp-list", dp_list, *extra])
    return scripts.launch(world, {"arguments": command, **options})


@pytest.mark.parametrize(("other", "other_dp"), [("1,2", "2,1"), ("1,1", "2,2")], ids=["swapped", "uniform"])
@pytest.mark.parametrize("optimizer", [(), RESHARDABLE], ids=["plain", "distributed"])
def test_replicas_resumed_in_another_list(
    scripts: Scripts, tmp_path: Path, other: str, other_dp: str, optimizer: tuple[str, ...]
) -> None:
    if optimizer and not saves_distributed():
        pytest.skip("this Megatron stores a distributed optimizer of a uniform list only")
    saving = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = succeeded(_start(scripts, "1,2", "1,2", [*optimizer, *saving]))
    (tmp_path / TRACKER).write_text("2")
    extra = [*optimizer, *resharding_flags(), "--load", str(tmp_path)]
    assert_same_training(
        succeeded(_start(scripts, other, other_dp, extra)), whole, first=2, tolerance=resume_tolerance()
    )


@pytest.mark.parametrize("sizes", ["1,2", "2,1"])
def test_one_rank_is_told_to_end(scripts: Scripts, tmp_path: Path, sizes: str) -> None:
    """All ranks save after that step and end well, and the run goes on from there."""
    saving = ["--save", str(tmp_path), "--save-interval", "100", "--exit-signal-handler"]
    command = arguments(sizes, extra=saving)
    runs = scripts.finish(num_ranks(sizes), {"arguments": command, "hooks": ["stop_one_rank"]})
    assert [len(run.steps) for run in runs] == [2] * 3
    assert (tmp_path / TRACKER).read_text() == "2"
    whole = scripts.train(sizes)
    resumed = scripts.train(sizes, ["--load", str(tmp_path)])
    assert_same_training(resumed, whole, first=2, tolerance=exact_resume_tolerance())


@pytest.mark.parametrize("sizes", ["1,2", "2,1"])
def test_a_save_that_does_not_fit_leaves_the_one_before(scripts: Scripts, tmp_path: Path, sizes: str) -> None:
    """All ranks end, the tracker still names the checkpoint of the second step, and the run goes on from there."""
    command = arguments(sizes, extra=["--save", str(tmp_path), "--save-interval", "2"])
    runs = scripts.launch(num_ranks(sizes), {"arguments": command, "hooks": ["limit_files"]})
    assert [run.exit_code for run in runs] == [1] * 3, [run.output[-2000:] for run in runs]
    reason = re.compile("CheckpointException|File too large")
    assert all(reason.search(run.output) for run in runs), [run.output[-3000:] for run in runs]
    assert (tmp_path / TRACKER).read_text() == "2"
    resumed = scripts.train(sizes, ["--load", str(tmp_path)])
    assert_same_training(resumed, scripts.train(sizes), first=2, tolerance=exact_resume_tolerance())
