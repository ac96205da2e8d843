"""Runs that are killed while they save, disks that fail, damaged files: what is loaded is whole, or nothing is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, losses, succeeded
from tests.multiproc.faults.kill_trial import FORMATS, NUM_RANKS, SIZES, Trial, judge, resume, run_trial, train
from tests.multiproc.hooks.kill_hooks import MUTANTS
from tests.support.lines import error_line
from tests.unit.checkpoint.test_damage import DAMAGES
from vtp_plugin.checkpoint.format.index import MANIFEST
from vtp_plugin.checkpoint.format.resolver import TRACKER

pytestmark = pytest.mark.needs("scripts_here")
Known = Callable[[str], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def known(scripts: Scripts, tmp_path_factory: pytest.TempPathFactory) -> Known:
    """Folders of runs that nothing happened to, with their losses; each is made once."""
    made: dict[str, tuple[Path, list[float]]] = {}

    def make(form: str) -> tuple[Path, list[float]]:
        if form not in made:
            folder = tmp_path_factory.mktemp("known") / "saved"
            made[form] = folder, losses(succeeded(train(scripts, folder, form)))
        return made[form]

    return make


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial("torch_dist", "half a shard", rank=1), id="half-a-shard"),
        pytest.param(Trial("torch_dist", "after metadata"), id="after-metadata", marks=FULL),
        pytest.param(Trial("torch_dist", "before tracker"), id="before-tracker", marks=FULL),
        pytest.param(Trial("torch_dist", "clean-up"), id="clean-up", marks=FULL),
        pytest.param(Trial("torch", "between shards", rank=2), id="torch-between", marks=FULL),
        pytest.param(Trial("torch", "half of the tracker"), id="torch-half-tracker", marks=FULL),
    ],
)
def test_a_killed_run_goes_on_from_a_whole_checkpoint(
    scripts: Scripts, known: Known, tmp_path: Path, trial: Trial
) -> None:
    reference, whole = known(trial.form)
    assert [*run_trial(scripts, tmp_path / "trial", trial, reference)] == []
    assert [*resume(scripts, tmp_path / "trial", trial, whole)] == []


@pytest.mark.full
@pytest.mark.needs("worker_on_cpus")
@pytest.mark.parametrize("point", ["half a shard", "before manifest"])
def test_a_run_that_saves_in_the_background_is_killed(
    scripts: Scripts, known: Known, tmp_path: Path, point: str
) -> None:
    reference, _ = known("background")
    assert [*run_trial(scripts, tmp_path / "trial", Trial("background", point, save=3), reference)] == []


@pytest.mark.full
@pytest.mark.needs("worker_on_cpus")
def test_a_run_that_fails_while_it_saves_in_the_background_leaves_the_one_before(
    scripts: Scripts, known: Known, tmp_path: Path
) -> None:
    reference, _ = known("background")
    folder, trial = tmp_path / "trial", Trial("background", "half a shard", save=3)
    runs = train(scripts, folder, trial.form, (), trial, act="sleep 5", hooks=["fail_in_next_step"])
    assert all(run.exit_code not in (0, None) for run in runs)
    assert "the disk is on fire" in runs[1].output and folder.with_suffix(".log").exists()
    assert (folder / "iter_0000001").exists() and not (folder / "iter_0000003").exists()
    assert [*judge(folder, trial, reference)] == []


CONTROLS = {"early tracker": Trial("", "half a shard", save=1), "skipped shard": Trial("", "after tracker")}


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch_dist", pytest.param("background", marks=pytest.mark.needs("worker_on_cpus"))])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_controls_are_found(scripts: Scripts, known: Known, tmp_path: Path, mutant: str, form: str) -> None:
    """A tracker that moves too early, which a kill then leaves, and a shard that is not there."""
    trial = replace(CONTROLS[mutant], form=form, mutant=mutant)
    problems = [*run_trial(scripts, tmp_path / "trial", trial, known(form)[0])]
    assert any(word in problem for problem in problems for word in ("the tracker says", ".distcp is missing")), problems


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB, on which one checkpoint has room and two have not."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.full
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_fails_leaves_the_checkpoint_before(
    scripts: Scripts, known: Known, small_disk: Path, form: str, trouble: str
) -> None:
    reference, whole = known(form)
    folder, trial = small_disk / "saved", Trial(form, "before a shard", rank=0)
    grow = ["mount", "-o", "remount,size=64m", str(small_disk)]
    if trouble == "read-only":
        subprocess.run(grow, check=True)
    # Mounted once more: the first mount cannot be read-only while files are open.
    act = "" if trouble == "full" else f"mount --bind {small_disk} {small_disk}; mount -o remount,bind,ro {small_disk}"
    runs = train(scripts, folder, form, (), None if trouble == "full" else trial, act=act)
    assert all(run.exit_code not in (0, None) for run in runs)
    error = "the file system is full" if trouble == "full" else "the file system is read-only"
    assert any(f"cannot be written: {error}" in run.output for run in runs), runs[0].output[-3000:]
    if trouble == "read-only":
        subprocess.run(["umount", str(small_disk)], check=True)
    subprocess.run(grow, check=True)
    assert [*judge(folder, trial, reference)] == []
    assert [*resume(scripts, folder, trial, whole)] == []


@pytest.mark.full
def test_a_folder_that_vanishes_ends_the_run(scripts: Scripts, known: Known, tmp_path: Path) -> None:
    reference, _ = known("torch_dist")
    folder, trial = tmp_path / "trial", Trial("torch_dist", "before metadata", rank=0)
    runs = train(scripts, folder, trial.form, (), trial, act=f"mv {folder} {tmp_path / 'gone'}")
    assert all(run.exit_code not in (0, None) for run in runs)
    assert any("cannot be written: the folder is gone" in run.output for run in runs), runs[0].output[-3000:]
    assert [*judge(tmp_path / "gone", trial, reference)] == []


FILES = ["metadata.json", ".metadata", "__1_0.distcp", MANIFEST]


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_refused_by_name_or_passed_over(
    scripts: Scripts, known: Known, tmp_path: Path, name: str, damage: str
) -> None:
    _spoil_and_load(scripts, known, tmp_path, "torch_dist", name, damage)


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["mp_rank_00_000/model_optim_rng.pt", "mp_rank_01_001/model_optim_rng.pt", MANIFEST])
def test_damage_of_the_old_format_is_refused_by_name_or_passed_over(
    scripts: Scripts, known: Known, tmp_path: Path, name: str, damage: str
) -> None:
    _spoil_and_load(scripts, known, tmp_path, "torch", name, damage)


def test_a_flipped_bit_is_refused_by_name_and_passed_over(scripts: Scripts, known: Known, tmp_path: Path) -> None:
    _spoil_and_load(scripts, known, tmp_path, "torch_dist", "__1_0.distcp", "bit")


def _spoil_and_load(scripts: Scripts, known: Known, tmp_path: Path, form: str, name: str, damage: str) -> None:
    reference, whole = known(form)
    folder = Path(shutil.copytree(reference, tmp_path / "copy"))
    (folder / TRACKER).write_text("3")
    file = folder / "iter_0000003" / name
    DAMAGES[damage](file)
    words = arguments(SIZES, extra=[*FORMATS[form], "--load", str(folder)])
    refused = scripts.launch(NUM_RANKS, {"arguments": words})
    # A rank that reads a piece ends by itself, before the others have come to the end of their own.
    assert all(run.exit_code not in (0, None) and not run.steps for run in refused)
    assert all(str(file) in (error_line(run.output) or "") for run in refused), [run.output[-3000:] for run in refused]
    runs = scripts.finish(NUM_RANKS, {"arguments": [*words, "--vtp-load-newest-valid"]})
    assert f"skipped: {file}" in runs[0].output.replace("\n", " ").replace("[vtp rank 0]", "").replace("  ", " ")
    assert losses(runs) == whole[2:]


@pytest.mark.full
def test_without_a_manifest_a_checkpoint_loads_and_one_line_says_so(
    scripts: Scripts, known: Known, tmp_path: Path
) -> None:
    """As an older version saved it: then the stored arguments know of none."""
    folder = tmp_path / "old"
    words = arguments(SIZES, extra=["--save", str(folder), "--save-interval", "2", "--vtp-log-level", "INFO"])
    succeeded(scripts.run(NUM_RANKS, "tests.multiproc.jobs.script_job:run_script", {
        "arguments": words, "hooks": ["forget_the_manifest"]}, timeout_s=150.0))  # fmt: skip
    assert not any(folder.glob(f"*/{MANIFEST}"))
    (folder / TRACKER).write_text("2")
    runs = scripts.finish(NUM_RANKS, {"arguments": arguments(SIZES, extra=["--load", str(folder)])})
    assert runs[0].output.count(MANIFEST) == 1 and losses(runs) == known("torch_dist")[1][2:]
