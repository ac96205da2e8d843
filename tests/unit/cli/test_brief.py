"""``run --brief``: what reaches the terminal, and that all else is in the file of the node; no torch is imported."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import PYTHON_PATH
from tests.support.pool import Done
from vtp_plugin.cli import brief
from vtp_plugin.errors import ConfigError

BEGIN = """\
import ctypes, os, signal, subprocess, sys, warnings
from vtp_plugin.cli import brief
from vtp_plugin.util import log
brief.begin()
"""
# As torch.distributed does: a traceback is collected, and written with the rank when the hook returns.
COLLECTING = """\
import io
def collecting(*error, before=sys.excepthook):
    sys.stderr, stream = io.StringIO(), sys.stderr
    before(*error)
    collected, sys.stderr = sys.stderr.getvalue(), stream
    sys.stderr.write("".join(f"[rank0]: {line}\\n" for line in collected.splitlines()))
sys.excepthook = collecting
"""


def launched(folder: Path, rank: int) -> dict[str, str]:
    """Give the variables of a rank of torchrun's."""
    error_file = folder / "none_ab12cd34" / "attempt_0" / str(rank) / "error.json"
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(error_file)}


def named(folder: Path) -> Path:
    """Give the path of the file of this node."""
    return folder / f"vtp-run-{socket.gethostname()}-ab12cd34.log"


def start(folder: Path, *words: str, rank: int = 0) -> Done:
    """Run a Python of its own, as one rank."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHON_PATH, **launched(folder, rank)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_that_a_rank_prints_is_in_the_file_even_if_it_is_killed(tmp_path: Path) -> None:
    """By Python, by system calls, by the C library, whose output is kept back where it is no terminal, by a child."""
    write = """\
for number in range(3):
    print("python", number)
    ctypes.CDLL(None).puts(b"library")
    os.write(1, b"call\\n")
    print("errors", file=sys.stderr)
    os.write(2, b"call\\n")
    subprocess.run(["echo", "child"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    ranks = [start(tmp_path, "-c", BEGIN + write, rank=rank) for rank in range(2)]
    file = named(tmp_path)
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * 2
    assert [rank.stdout for rank in ranks] == [f"all else that this node prints goes into {file}\n", ""]
    assert [rank.stderr for rank in ranks] == ["", ""]
    own = [line for n in range(3) for line in (f"python {n}", "library", "call", "errors", "call", "child")]
    assert file.read_text().splitlines() == own * 2


def test_each_warning_is_shown_once_whichever_rank_has_it(tmp_path: Path) -> None:
    """Also if a rank has it again much later; other ranks of the node have it at about the same time."""
    long = "word " * 100
    warn = f"""\
for _ in range(2):
    if os.environ["RANK"] == "0":
        print("much" * 1000 * 1000)
    log.warning("same")
    log.warning("same and more")
    log.warning("own of " + os.environ["RANK"])
    log.warning({long!r})
    log.info("not shown")
warnings.warn("of Python")
warnings.warn("of Python")
"""
    code = BEGIN + warn
    where = code.splitlines().index('warnings.warn("of Python")') + 1
    ranks = [start(tmp_path, "-c", code, rank=rank) for rank in (0, 10)]
    texts = ["same", "same and more", "own of 0", long.strip(), f"UserWarning: of Python (<string>:{where})"]
    assert ranks[0].stderr.splitlines() == [f"[vtp rank 0] warning: {text}" for text in texts]
    assert ranks[1].stderr == "[vtp rank 10] warning: own of 10\n"
    assert ranks[1].stdout == ""
    text = named(tmp_path).read_text()
    assert text.count("] warning: same\n") == 4 and text.count("[vtp rank 0] not shown\n") == 2


@pytest.mark.parametrize("hook", ["", COLLECTING], ids=["python", "torch"])
def test_an_error_is_one_line_and_the_end_of_the_file(tmp_path: Path, hook: str) -> None:
    """A second process errs, too: what it says is in the file alone. An earlier error is of an earlier attempt."""
    named(tmp_path).write_text("[vtp rank 0] error: of an attempt before\n")
    fail = """\
for number in range(30):
    print("line", number)
child = os.fork()
if child:
    os.waitpid(child, 0)
raise ValueError("second" if child else "first\\nand more")
"""
    done = start(tmp_path, "-c", BEGIN + hook + fail)
    assert done.returncode == 1
    said, about, *last = done.stderr.splitlines()
    assert said == "[vtp rank 0] error: ValueError: first"
    assert about == f"the last lines of {named(tmp_path)}:"
    assert len(last) == 20 and "line 29" in last and any(line.endswith("ValueError: first") for line in last)
    assert "second" not in done.stderr
    assert re.search(r"ValueError: second$", named(tmp_path).read_text(), re.MULTILINE)


def test_no_character_of_the_file_controls_the_terminal(tmp_path: Path) -> None:
    done = start(tmp_path, "-c", BEGIN + "print('\\x1b[2J')\nlog.error('over')")
    assert done.stderr.endswith("\\x1b[2J\n[vtp rank 0] error: over\n") and "\x1b" not in done.stderr


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    named(tmp_path).mkdir()
    with pytest.raises(ConfigError) as caught:
        brief.begin(launched(tmp_path, 0))
    assert str(caught.value) == f"--brief: Is a directory: {named(tmp_path)}; start in a folder that can be written"


def test_without_a_launcher_each_process_has_its_own_file() -> None:
    names = [brief.file_name(environment, "n3") for environment in ({}, {"RANK": "0"})]
    assert len({*names}) == 2 and all(re.fullmatch(r"vtp-run-n3-\d+\.log", name) for name in names)


def test_a_run_that_would_show_no_step_ends_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('started')")
    done = start(tmp_path, "-m", "vtp_plugin", "run", "--brief", "train.py", "--lr", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "vtp_plugin: error: --brief without --vtp-size-list; no step would be shown; give the list, such as 1,1 for "
        "equal stages\n"
    )
    assert not list(tmp_path.glob("*.log"))
