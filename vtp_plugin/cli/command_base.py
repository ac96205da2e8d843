"""What all commands use: a parser whose errors are one line, and functions that write results."""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import vtp_plugin
from vtp_plugin.cli.terminal import print_line_of_error, show
from vtp_plugin.errors import ConfigError
from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.util.text import plain

PAGE = ".html"
"""Ending of the name of a page."""
_MAX_COLUMNS = 120
_HEAD = 4096  # characters, in which the first element of a picture begins


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the line breaks of help texts."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=min(_MAX_COLUMNS, shutil.get_terminal_size().columns - 2))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [line for part in text.splitlines() for line in super(HelpFormatter, self)._split_lines(part, width)]


class Parser(argparse.ArgumentParser):
    """Prints errors as one line, takes no abbreviated flags, as a run takes none, and has a help of one screen.

    The groups of :attr:`more` are shown by ``--help-all`` only.

    Attributes:
        more: groups of flags that are left out of ``--help``; they may be those of another parser.
        most_used: texts of the flags among them that ``--help`` shows nevertheless, by name.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", HelpFormatter)
        options["allow_abbrev"] = False
        super().__init__(**options)
        self.more: list[argparse._ArgumentGroup] = []
        self.most_used: dict[str, str] = {}

    def shorten(self, more: Sequence[argparse._ArgumentGroup], most_used: Mapping[str, str]) -> None:
        """Leave groups out of ``--help``, and declare ``--help-all``.

        Args:
            more: the groups.
            most_used: texts of their flags that are shown nevertheless, by name.
        """
        self.more += more
        self.most_used |= most_used
        if self.add_help:
            self.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")

    def format_help(self, *, is_all: bool = False) -> str:
        """Write the help, the command's own flags first.

        Args:
            is_all: whether with all groups, and what is said at the end.
        """
        if not self.more:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or f"{self.prog} [flags]", self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        for group in self._action_groups:
            if group not in self.more:
                _add_group(formatter, group, group._group_actions)
        actions = [action for group in self.more for action in group._group_actions]
        if is_all:
            for group in self.more:
                _add_group(formatter, group, group._group_actions)
            formatter.add_text(self.epilog)
            return formatter.format_help()
        by_name = {action.option_strings[0]: action for action in actions}
        formatter.start_section("the most used flags of a run")
        formatter.add_arguments(_with_text(by_name[name], text) for name, text in self.most_used.items())
        formatter.end_section()
        number = len(actions) - len(self.most_used)
        formatter.add_text(f"{self.prog} --help-all: {number} more flags of a run")
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Leave with the error and a pointer to ``--help``."""
        fail(f"{message}; see: {self.prog} --help")


class _HelpAll(argparse.Action):
    """Prints the whole help, and leaves."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, nargs=0, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        parser._print_message(parser.format_help(is_all=True), sys.stdout)
        parser.exit()


class OneFile(argparse.Action):
    """Keeps the path of the file to write; a second one is refused, since the first would not be written."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, *_: object) -> None:
        """Keep `values`, or leave with the error."""
        if (first := getattr(namespace, self.dest)) is not None:
            flag = self.option_strings[0]
            raise argparse.ArgumentError(
                None, f"{flag} {first} and {values}: a command writes one file; give one of them"
            )
        setattr(namespace, self.dest, values)


def _add_group(
    formatter: argparse.HelpFormatter, group: argparse._ArgumentGroup, actions: Iterable[argparse.Action]
) -> None:
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(actions)
    formatter.end_section()


def _with_text(action: argparse.Action, text: str) -> argparse.Action:
    """Give a flag with another text."""
    other = copy.copy(action)
    other.help = text
    return other


def fail(message: str) -> NoReturn:
    """Leave with one line and exit code 2."""
    print_error(message)
    sys.exit(2)


def print_error(message: str) -> None:
    """Print the line with which a command leaves."""
    text = plain(message).replace("\n", "\\n")  # such as in a name that a file gives
    print_line_of_error(f"vtp_plugin: error: {text}")


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
        ConfigError: it cannot be written, or would replace a file that is something else.
    """
    try:
        _check_replaced(path, flag)
        path.write_text(text, encoding="ascii")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}; choose another file") from error


def _check_replaced(path: Path, flag: str) -> None:
    """Refuse to replace, by a picture, what is none: a name may be mistyped."""
    if path.suffix != ".svg" or not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.read(_HEAD)
    if head and "<svg" not in head:
        raise ConfigError(f"{flag} {path} is no picture; only pictures are replaced; choose another file")


def check_folder(path: Path, *, flag: str = "--output") -> None:
    """Refuse a file that cannot be written where it is to be, before work is done for it.

    Args:
        path: path that the flag gave.
        flag: flag that gave the path, for the error.

    Raises:
        ConfigError: its folder is not there, or it may not be written.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; make it, or choose another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path} may not be written; choose another file")


def check_ending(path: Path | None, endings: Mapping[str, str]) -> None:
    """Refuse a file of ``--output`` whose ending names no format of the command, or that cannot be written.

    Args:
        path: path that the flag gave; None is accepted.
        endings: the formats by their endings.

    Raises:
        ConfigError: the ending is another one, or see :func:`check_folder`.
        ImportError: the file is to be a page, and the package that pages need is missing.
    """
    if path is None:
        return
    if path.suffix not in endings:
        known = " or ".join(f"{ending} ({what})" for ending, what in endings.items())
        raise ConfigError(f"--output {path}: the name must end in {known}")
    check_folder(path)
    if is_page(path):
        import_module("jinja2")  # now, and not when a search is over


def is_page(path: Path | None) -> bool:
    """Tell whether a result is to be written as a page."""
    return path is not None and path.suffix == PAGE


def add_output_flag(group: argparse._ActionsContainer, metavar: str, text: str, *names: str) -> None:
    """Declare ``--output``.

    Args:
        group: group that gets the flag.
        metavar: what stands for its value.
        text: what may be written.
        names: older names of the flag.
    """
    group.add_argument("--output", *names, action=OneFile, type=Path, metavar=metavar, help=text)


def add_json_flag(group: argparse._ActionsContainer, text: str = "print one JSON object instead of text") -> None:
    """Declare ``--json``."""
    group.add_argument("--json", action="store_true", help=text)


def command_of(argv: Sequence[str]) -> str:
    """Give the name of a command, with that of its action.

    >>> command_of(["plan", "--json"]), command_of(["checkpoint", "show", "DIR"])
    ('plan', 'checkpoint show')
    """
    return " ".join(argv[: 1 + (argv[0] == "checkpoint")])


def print_answer(options: argparse.Namespace, answer: object, parts: Iterable[str | TextTable]) -> None:
    """Print an answer, as text or, with ``--json``, as one JSON object, with the command and the plugin's version.

    Args:
        options: parsed arguments.
        answer: what is known, by its names: a dataclass or a mapping.
        parts: the same in words.
    """
    if options.json:
        head = {"command": command_of(options.argv), "vtp_plugin": vtp_plugin.__version__}
        print(json.dumps(head | as_json(answer), default=as_json, indent=2))
    else:
        show(parts)


def as_json(value: object) -> Any:
    """Give what JSON has no form for: the fields of a dataclass, the text of anything else."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value if isinstance(value, Mapping) else str(value)


def named(thing: object, *names: str) -> dict[str, Any]:
    """Give attributes by their names.

    >>> named(range(2, 8), "start", "stop")
    {'start': 2, 'stop': 8}
    """
    return {name: getattr(thing, name) for name in names}


def written(options: argparse.Namespace) -> Iterator[str]:
    """Name the file that was written, if one was asked for."""
    if options.output is not None:
        yield f"wrote {options.output}"


def with_values(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Give parsed arguments with other values for some; what was parsed stays as it is."""
    return argparse.Namespace(**{**vars(args), **values})
