"""The commands of docs/guides/lost-cards.md, as they stand there, with the reader's own words filled in."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.pool import ENVIRONMENT
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
