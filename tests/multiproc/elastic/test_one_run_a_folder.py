"""A folder of checkpoints belongs to one run: another one that would save there is refused before it trains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.multiproc.cases.script_cases import Scripts, arguments, assert_refused, losses
from tests.support.hosts import PYTHON_PATH, ROOT, example_script
from tests.support.lines import error_line
from tests.support.pace import pace
from tests.support.pool import ENVIRONMENT, free_port
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.save.saving import LOCK

pytestmark = pytest.mark.needs("scripts_here")
LEGACY = ("--ckpt-format", "torch")
HOLD = """
import sys, time
from pathlib import Path
from vtp_plugin.checkpoint.save.saving import FolderLock
lock = FolderLock(Path(sys.argv[1]), {"TORCHELASTIC_RUN_ID": "first"}, 0.0)
print("held", flush=True)
time.sleep(600)
"""
PATIENCE = ("--vtp-timeout-s", str(int(10 * pace())))
OFTEN = ("--save-interval", "2")


@contextlib.contextmanager
def held(folder: Path) -> Iterator[int]:
    """Let another process have a folder; give its number."""
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        yield other.pid
    finally:
        other.kill()
        other.communicate()


def refused(scripts: Scripts, sizes: str, extra: Sequence[str], *words: str, **options: object) -> None:
    """All ranks end with one line, and none has trained."""
    kwargs = {"arguments": arguments(sizes, extra=[*extra, *OFTEN, *PATIENCE]), **options}
    runs = scripts.launch(sum(map(int, sizes.split(","))), kwargs)
    assert_refused(runs, *words)
    assert not any("initializing torch distributed" in run.output for run in runs), "refused too late"
    assert not any(run.steps for run in runs)


@pytest.mark.parametrize(
    ("sizes", "extra"),
    [
        ("1,2", []),
        pytest.param("1,2", LEGACY, marks=pytest.mark.full),
        pytest.param(
            "1,1", [], marks=pytest.mark.full
        ),  # stock training; the plugin writes its checkpoints all the same
        pytest.param("1", [], marks=pytest.mark.full),
    ],
)
def test_the_second_run_is_refused_on_all_ranks(
    scripts: Scripts, tmp_path: Path, sizes: str, extra: Sequence[str]
) -> None:
    folder = tmp_path / "runs"
    with held(folder) as process:
        (folder / "partial_iter_0000002").mkdir()
        rule = f"--save {folder} belongs to another run, first (process {process} on "
        way_out = "; each would overwrite the other's checkpoints; give another folder, or end that run"
        refused(scripts, sizes, ["--save", str(folder), *extra], rule, way_out)
        assert {path.name for path in folder.iterdir()} == {LOCK, "partial_iter_0000002"}
        assert json.loads((folder / LOCK).read_text())["process"] == process


def test_what_saves_nothing_takes_no_folder(scripts: Scripts, tmp_path: Path) -> None:
    """A run that reads a folder which another one has, and the same once more while the first still lives."""
    scripts.train("1,2", ["--save", str(tmp_path), *OFTEN, "--exit-interval", "2"])
    assert (tmp_path / TRACKER).read_text() == "2"
    with held(tmp_path):
        before = (tmp_path / LOCK).read_bytes()
        assert len(losses(scripts.train("1,2", ["--load", str(tmp_path), *PATIENCE]))) == 2
        skipped = ["--load", str(tmp_path), "--save", str(tmp_path), "--skip-train", "--eval-iters", "1"]
        assert not any(run.steps for run in scripts.train("1,2", [*skipped, *OFTEN, *PATIENCE]))
        assert (tmp_path / LOCK).read_bytes() == before
    assert not (tmp_path / "iter_0000004").exists()


@pytest.mark.full
def test_folders_of_their_own(scripts: Scripts, tmp_path: Path) -> None:
    """Every rank has a folder, as sites have: each is locked, and the one that another run has is named."""
    folders = [tmp_path / str(rank) for rank in range(3)]
    by_rank = {rank: ["--save", str(folder)] for rank, folder in enumerate(folders)}
    scripts.train("1,2", [*LEGACY, *OFTEN, *PATIENCE], by_rank=by_rank)
    tokens = {json.loads((folder / LOCK).read_text())["token"] for folder in folders}
    assert len(tokens) == 1
    with held(folders[2]):
        refused(scripts, "1,2", LEGACY, f"rank 2: --save {folders[2]} belongs to another run", by_rank=by_rank)


@pytest.mark.full
@pytest.mark.parametrize("what", ["non-persistent", "converted"])
def test_other_folders_of_checkpoints(scripts: Scripts, tmp_path: Path, what: str) -> None:
    saved, other = tmp_path / "saved", tmp_path / "other"
    flags = ["--non-persistent-ckpt-type", "global", "--non-persistent-save-interval", "2"]
    flags += ["--save", str(saved), "--non-persistent-global-ckpt-dir", str(other)]
    if what == "converted":
        scripts.train("1,2", ["--save", str(saved), *OFTEN, "--exit-interval", "2"])
        flags = ["--load", str(saved), "--ckpt-convert-format", "torch", "--ckpt-convert-save", str(tmp_path)]
        other = tmp_path / "torch"
    with held(other):
        refused(scripts, "1,2", flags, f"{other} belongs to another run, first")


@pytest.mark.parametrize("what", ["a link", "a pipe", "two names", "a file for a folder"])
def test_the_lock_is_written_nowhere_else(scripts: Scripts, tmp_path: Path, what: str) -> None:
    folder, victim = tmp_path / "runs", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("a key")
    words = f"{folder / LOCK} is no plain file of one name; a run writes its name into it; remove it"
    if what == "a link":
        (folder / LOCK).symlink_to(victim)
        words = f"{folder / LOCK} is a link; a run writes its name there and follows none; remove it"
    elif what == "a pipe":
        os.mkfifo(folder / LOCK)
    elif what == "two names":
        os.link(victim, folder / LOCK)
    else:
        folder = victim
        words = f"--save {victim} cannot be written (File exists"
    refused(scripts, "1", ["--save", str(folder)], words)
    assert victim.read_text() == "a key"
    if folder != victim:
        (folder / LOCK).unlink()  # the way out
        scripts.train("1", ["--save", str(folder), *OFTEN])


def _start(folder: Path, num_steps: int, log: Path) -> subprocess.Popen[bytes]:
    """Start a run of one process, as users do, which saves every second step."""
    words = [*arguments("1", extra=["--save", str(folder), *OFTEN, *LEGACY, *PATIENCE])]
    words[words.index("--train-iters") + 1] = str(num_steps)
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "vtp_plugin", "run", example_script(), *words]
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def _newest(folder: Path) -> int:
    try:
        return int((folder / TRACKER).read_text())
    except FileNotFoundError:
        return 0


@pytest.mark.full
def test_two_runs_of_one_folder(tmp_path: Path) -> None:
    """The first goes on saving; the second ends, and trains in another folder, or when the first has ended."""
    folder, logs = tmp_path / "runs", [tmp_path / f"{number}.log" for number in range(4)]
    first = _start(folder, 100_000, logs[0])
    try:
        deadline_s = time.monotonic() + 120.0 * pace()
        while _newest(folder) < 2 and time.monotonic() < deadline_s and first.poll() is None:
            time.sleep(0.1)
        assert _newest(folder) >= 2, logs[0].read_text()[-3000:]
        second, elsewhere = _start(folder, 4, logs[1]), _start(tmp_path / "another", 4, logs[2])
        assert second.wait(timeout=120 * pace()) == 1, logs[1].read_text()[-3000:]
        line = error_line(logs[1].read_text())
        assert re.search(rf"--save {folder} belongs to another run, (\S+ \()?process {first.pid} on ", line), line
        assert elsewhere.wait(timeout=120 * pace()) == 0, logs[2].read_text()[-3000:]
        seen = _newest(folder)
        while _newest(folder) == seen and time.monotonic() < deadline_s:
            time.sleep(0.1)
        assert _newest(folder) > seen and first.poll() is None, logs[0].read_text()[-3000:]
    finally:
        first.kill()
        first.wait()
    assert _start(folder, 4, logs[3]).wait(timeout=120 * pace()) == 0, logs[3].read_text()[-3000:]
    assert _newest(folder) == _newest(tmp_path / "another") == 4
