"""The commands of docs/guides/lost-cards.md, as they stand there, with the reader's own words filled in."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.pace import pace
from tests.support.pool import ENVIRONMENT, free_port
from vtp_plugin.plan.launch.launch_commands import COMMANDS

GUIDE = ROOT / "docs/guides/lost-cards.md"
_RUN = "run ..."
_FOLDER = "CHECKPOINTS"


def printed(name: str) -> str:
    """Give a command as the guide prints it, found there by what ``doctor`` prints."""
    command = "\n".join(COMMANDS[name])
    blocks = re.findall(r"```sh\n(.*?)\n```", GUIDE.read_text(), re.DOTALL)
    assert blocks.count(command) == 1, f"docs/guides/lost-cards.md does not have the command of doctor for {name}"
    return command


def filled(
    name: str, words: Sequence[str] = (), folder: Path | None = None, changed: Mapping[str, str] | None = None
) -> str:
    """Give a command with a script and flags in the place of ``run ...``, and the folder of checkpoints.

    Args:
        name: of the command.
        words: script and flags, quoted for the shell.
        folder: of checkpoints.
        changed: what a test needs otherwise, such as shorter waits; what is named must be there.
    """
    text = printed(name)
    for old, new in (changed or {}).items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    return text.replace(_RUN, " ".join(("-m vtp_plugin run", *words))).replace(_FOLDER, str(folder))


def environment(**variables: object) -> dict[str, str]:
    """Give the environment of a shell in which ``torchrun`` and ``python`` are this one's."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    known = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    given = {name: str(value) for name, value in variables.items()}
    return {**known, **ENVIRONMENT, "PATH": path, "PYTHONPATH": PYTHON_PATH, **given}


def run_as_printed(folder: Path, block: str, *, limit_s: float) -> str:
    """Run commands as a document prints them, in a folder with a copy of the examples; return what they print.

    Args:
        folder: empty; what they write stays in it.
        block: of the shell.
        limit_s: how long they may take, on a machine of the usual pace.
    """
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").symlink_to(ROOT / "tests")
    done = subprocess.run(
        ["bash", "-ec", block],
        cwd=folder,
        env=environment(PET_MASTER_PORT=free_port()),  # others may have torchrun's own
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s * pace(),
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
