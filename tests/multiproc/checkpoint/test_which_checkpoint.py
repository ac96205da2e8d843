"""Which checkpoint a run loads, where some are persistent and some are not, and what it says about it.

``tests/unit/checkpoint/test_resolver.py`` has all cells, against Megatron's own answer; these are runs.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import (
    ScriptRun,
    Scripts,
    arguments,
    assert_refused,
    losses,
    num_ranks,
    succeeded,
)
from tests.support.lines import error_line
from vtp_plugin.checkpoint.format.resolver import TRACKER

pytestmark = pytest.mark.needs("scripts_here")

OFTEN = ["--use-distributed-optimizer", "--non-persistent-ckpt-type", "global"]
# The losses of a run that is not stopped: all are compared with it.
Written = Callable[[], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def written(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A folder with persistent checkpoints of steps 1, 2 and 3, made once, and the losses of the run."""
    known: list[tuple[Path, list[float]]] = []

    def write() -> tuple[Path, list[float]]:
        if not known:
            folder = tmp_path_factory.mktemp("written")
            runs = scripts.train("1,2", [*OFTEN, "--save", str(folder), "--save-interval", "1"])
            known.append((folder, losses(runs)))
        return known[0]

    return write


def _lay(source: Path, folder: Path, persistent: Sequence[int], others: Sequence[int]) -> Path:
    """Lay checkpoints into a folder, and those that are not persistent into the one below it."""
    for place, numbers in ((folder, persistent), (folder / "non_persistent", others)):
        for number in numbers:
            shutil.copytree(source / f"iter_{number:07d}", place / f"iter_{number:07d}")
            (place / TRACKER).write_text(str(number))
    return folder


def _damage(checkpoint: Path, is_deep: bool) -> None:
    """Flip bytes in the largest file, which only a reader sees, or remove one that is looked for."""
    if not is_deep:
        (checkpoint / "metadata.json").unlink()
        return
    file = max(checkpoint.glob("*.distcp"), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0x15 for byte in data[middle : middle + 64])
    file.write_bytes(data)


def _load(scripts: Scripts, folder: Path, *words: str, sizes: str = "1,2") -> list[ScriptRun]:
    extra = [*OFTEN, "--load", str(folder), *words]
    return scripts.launch(num_ranks(sizes), {"arguments": arguments(sizes, extra=extra)})


def test_the_newest_intact_one_of_both_folders_is_loaded(scripts: Scripts, written: Written, tmp_path: Path) -> None:
    """At 5eccb133 the run ended: it looked into ``--load`` alone."""
    source, whole = written()
    folder = _lay(source, tmp_path / "runs", [2], [1, 3])
    _damage(folder / "non_persistent" / "iter_0000003", is_deep=True)
    runs = succeeded(_load(scripts, folder, "--vtp-load-newest-valid"))
    said = " ".join(runs[0].output.replace("[vtp rank 0]", "").split())
    assert f"skipped: {folder}/non_persistent/iter_0000003/" in said
    assert f"loads {folder}/iter_0000002, the newest intact checkpoint" in said
    assert losses(runs) == whole[2:]


def test_a_step_that_a_newer_one_overrules_is_refused(scripts: Scripts, written: Written, tmp_path: Path) -> None:
    """Megatron loads the newer one without a word. What the line says is done."""
    source, whole = written()
    folder = _lay(source, tmp_path / "runs", [2], [3])
    newest = folder / "non_persistent"
    line = f"--ckpt-step 2; Megatron loads {newest}/iter_0000003 in its place, which is newer and not persistent; "
    assert_refused(_load(scripts, folder, "--ckpt-step", "2"), f"{line}move {newest} away")
    newest.rename(tmp_path / "away")
    assert losses(succeeded(_load(scripts, folder, "--ckpt-step", "2"))) == whole[2:]


@pytest.mark.full
def test_a_uniform_list_warns_that_a_step_is_overruled(scripts: Scripts, written: Written, tmp_path: Path) -> None:
    """There Megatron's own behaviour stays."""
    source, _ = written()
    folder = _lay(source, tmp_path / "runs", [2], [3])
    runs = succeeded(_load(scripts, folder, "--ckpt-step", "2", "--no-load-optim", "--no-load-rng", sizes="1,1"))
    said = " ".join(runs[0].output.replace("[vtp rank 0]", "").split())
    assert f"Megatron loads {folder}/non_persistent/iter_0000003 in its place" in said
    assert [len(run.steps) for run in runs] == [1, 1]


@pytest.mark.full
@pytest.mark.parametrize("words", [[], ["--ckpt-step", "2"], ["--ckpt-step", "1"]], ids=" ".join)
@pytest.mark.parametrize("is_deep", [False, True])
@pytest.mark.parametrize(
    ("persistent", "others", "damaged"),
    [
        ([1, 2], [3], "non_persistent/iter_0000003"),
        ([1, 3], [2], "iter_0000003"),
        ([1, 2], [1], "iter_0000002"),
        ([2], [2], "non_persistent/iter_0000002"),
        ([], [1, 2], "non_persistent/iter_0000002"),
    ],
    ids=str,
)
def test_ways_out_are_gone_until_a_run_trains(
    scripts: Scripts,
    written: Written,
    tmp_path: Path,
    persistent: list[int],
    others: list[int],
    damaged: str,
    is_deep: bool,
    words: list[str],
) -> None:
    """Each line names a way out; at its end a run trains from an intact checkpoint, as the run that was not stopped."""
    source, whole = written()
    folder = _lay(source, tmp_path / "runs", persistent, others)
    _damage(folder / damaged, is_deep)
    flags = list(words)
    for _ in range(4):
        runs = _load(scripts, folder, *flags)
        if all(run.exit_code == 0 for run in runs):
            break
        line = next(found for run in runs if (found := error_line(run.output)) and "; " in found)
        flags = _follow(line, flags)
    assert losses(succeeded(runs)) == whole[4 - len(losses(runs)) :] and runs[0].steps


def _follow(line: str, flags: list[str]) -> list[str]:
    """Do what a line says, and return the flags with which the run starts again."""
    way = re.search(r"(--ckpt-step (\d+)|--vtp-load-newest-valid|move \S+ away|leave --ckpt-step out)", line)
    other = re.search(r"write (\d+) into ([^\s,]+)", line)
    assert way or other, line
    if other:
        Path(other[2]).write_text(other[1])
    if moved := re.search(r"move (\S+) away", line):
        Path(moved[1]).rename(f"{moved[1]}-away")
    if "--vtp-load-newest-valid" in line:
        return ["--vtp-load-newest-valid"]
    if step := re.search(r"with --ckpt-step (\d+)", line):
        return ["--ckpt-step", step[1]]
    return [] if "leave --ckpt-step out" in line else flags


@pytest.mark.full
@pytest.mark.parametrize("flag", ["--vtp-load-newest-valid", ""])
def test_what_a_run_has_saved_comes_before_what_it_began_with(
    scripts: Scripts, written: Written, tmp_path: Path, flag: str
) -> None:
    """A run that begins with other weights, and is stopped before its first persistent checkpoint."""
    source, whole = written()
    folder, pretrained = _lay(source, tmp_path / "runs", [], [2]), _lay(source, tmp_path / "pretrained", [3], [])
    runs = succeeded(_load(scripts, folder, "--pretrained-checkpoint", str(pretrained), *flag.split()))
    if flag:
        assert losses(runs) == whole[2:]
        return
    said = " ".join(runs[0].output.replace("[vtp rank 0]", "").split())
    assert f"{folder}/non_persistent/iter_0000002 is there" in said and len(runs[0].steps) == 4


@pytest.mark.full
def test_options_are_taken_from_the_one_that_is_chosen(scripts: Scripts, written: Written, tmp_path: Path) -> None:
    """With --use-checkpoint-args a checkpoint is read before there are groups."""
    source, whole = written()
    folder = _lay(source, tmp_path / "runs", [2], [3])
    for file in (folder / "non_persistent" / "iter_0000003").glob("*.distcp"):
        file.unlink()
    runs = succeeded(_load(scripts, folder, "--vtp-load-newest-valid", "--use-checkpoint-args"))
    assert losses(runs) == whole[2:]
