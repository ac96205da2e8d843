"""A file beside the checkpoint for an error that no restart cures: launchers only count restarts."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtp_plugin.errors import ConfigError

MARKER = "vtp_stopped.txt"
"""The name of the file."""
RUN_FOLDER_VARIABLE = "VTP_RUN_FOLDER"
"""Set in the ranks of a run that is restarted automatically: the folder of its checkpoints."""


def run_folder(argv: Sequence[str]) -> Path | None:
    """Return the folder of a run's checkpoints, which its command line names by ``--save``.

    A run that only loads writes nothing beside the checkpoint that it loads, which may be another run's.

    Returns:
        The folder; None if there is none, or it is not one of this machine, such as ``msc://``.

    >>> str(run_folder(["pretrain_gpt.py", "--load", "old", "--save=new", "--lr", "1"]))
    'new'
    >>> run_folder(["pretrain_gpt.py", "--load", "old"]) is None
    True
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--save")
    try:
        args, _ = parser.parse_known_args(list(argv[1:]))
    except argparse.ArgumentError:
        return None  # the script's parser says what is wrong
    name = args.save
    return None if name is None or "://" in name else Path(name)


def require_unmarked(folder: Path | None) -> None:
    """Raise if an earlier start of the run left the marker.

    Raises:
        ConfigError: there is a marker; the text says how the earlier start ended, and where the marker is.
    """
    if folder is None:
        return
    path = folder / MARKER
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8").strip().partition("\n")[0]
        raise ConfigError(f"{text}; no restart cures this; fix it, then remove {path}")


def leave_marker(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write the marker, atomically: why no later start can succeed. An older marker stays.

    Args:
        text: error with which this start ends.
        environment: variables of this process; they name the folder if a launcher restarts the run.
    """
    name = environment.get(RUN_FOLDER_VARIABLE)
    if not name:
        return
    way_out = "No later start continues while this file is here: fix that, then remove it."
    put_beside(Path(name) / MARKER, f"{text}\n{way_out}\n", replaces=False)


def put_beside(path: Path, text: str, *, replaces: bool = True) -> None:
    """Write a file atomically; if that fails, do nothing.

    Args:
        path: path of the file; its folder is created.
        text: content of the file.
        replaces: whether to replace a file that is there.
    """
    own = path.with_name(f".{path.name}.{os.getpid()}.{os.uname().nodename}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        with own.open("x", encoding="utf-8") as file:  # never through a link
            file.write(text)
        (own.replace if replaces else functools.partial(os.link, own))(path)
    with contextlib.suppress(OSError):
        own.unlink()
