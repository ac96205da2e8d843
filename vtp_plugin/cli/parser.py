"""What all commands use: a parser whose errors are one line, and functions that write results."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import vtp_plugin
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.printable import plain

_MAX_COLUMNS = 120


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the line breaks of help texts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(_MAX_COLUMNS, shutil.get_terminal_size().columns - 2))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.splitlines() for line in super(HelpFormatter, self)._split_lines(part, width)]


class Parser(argparse.ArgumentParser):
    """Prints errors as one line, and takes no abbreviated flags, as a run takes none."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        options["allow_abbrev"] = False
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        """Leave with the error and a pointer to ``--help``."""
        fail(f"{message}; see: {self.prog} --help")


def fail(message: str) -> NoReturn:
    """Leave with one line and exit code 2."""
    text = plain(message).replace("\n", "\\n")  # such as in a name that a file gives
    print(f"vtp_plugin: error: {text}", file=sys.stderr)
    sys.exit(2)


def read_sizes(text: str) -> list[int]:
    """Read a list of sizes.

    >>> read_sizes("1,2,4")
    [1, 2, 4]
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = [0]
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes; write one such as 1,2,4")
    return sizes


def write_file(path: Path, text: str, *, flag: str = "--output") -> None:
    """Write a result.

    Args:
        path: path of the file.
        text: contents of the file.
        flag: flag that gave the path, for the error.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}; choose another file") from error


def check_ending(path: Path | None, endings: Mapping[str, str], *, flag: str = "--output") -> None:
    """Refuse a file whose ending names no format of the command.

    Args:
        path: path that the flag gave; None is accepted.
        endings: the formats by their endings.
        flag: flag that gave the path, for the error.

    Raises:
        ConfigError: the ending is another one.
    """
    if path is not None and path.suffix not in endings:
        known = " or ".join(f"{ending} ({what})" for ending, what in endings.items())
        raise ConfigError(f"{flag} {path}: the name must end in {known}")


def print_json(command: str, result: Mapping[str, object]) -> None:
    """Print a result as one JSON object, with the command and the plugin's version."""
    print(json.dumps({"command": command, "vtp_plugin": vtp_plugin.__version__, **result}, indent=2))


def with_values(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Give parsed arguments with other values for some; what was parsed stays as it is."""
    return argparse.Namespace(**{**vars(args), **values})
