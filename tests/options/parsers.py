"""Which options the command line of a Megatron has, and which values, as the parser says or as a committed list does.

Wheels before 0.19 have no ``megatron.training``, so ``tests/options/megatron-0.12.txt`` and ``-0.16.txt`` hold what the
parsers of such a tree say: one option a line, with its other names, and in braces the values among which it chooses.
A list is written anew by ``VTP_MEGATRON_LM=/a/tree python -m tests.options.parsers 0.16``.
"""

from __future__ import annotations

import argparse
import enum
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
LISTED = ("0.12", "0.16")
"""Families whose parsers are committed as lists."""
_LINE = re.compile(r"((?:-[-\w]+ ?)+)(?:\{(.+)\})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a command line.

    Attributes:
        names: the flags that mean it, the first as its help does.
        choices: the values among which it chooses; empty if it takes none, or any.
    """

    names: tuple[str, ...]
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*self.names, *(["{" + ",".join(self.choices) + "}"] if self.choices else [])])


def options_of(parser: argparse.ArgumentParser) -> list[Option]:
    """List the options of a parser.

    >>> parser = argparse.ArgumentParser(add_help=False)
    >>> _ = parser.add_argument("--kind", "--sort", choices=["a", "b"])
    >>> print(*options_of(parser))
    --kind --sort {a,b}
    """
    return [
        Option(names=tuple(action.option_strings), choices=tuple(_choices(action.choices or ())))
        for action in parser._actions
        if action.option_strings
    ]


def _choices(values: Sequence[object]) -> Iterator[str]:
    for value in values:
        if not isinstance(value, signal.Signals):  # which of them there are depends on the system
            yield value.name if isinstance(value, enum.Enum) else str(value)


def listed(family: str) -> list[Option]:
    """Read the committed list of a family."""
    return [_read(line) for line in (FOLDER / f"megatron-{family}.txt").read_text().splitlines()]


def _read(line: str) -> Option:
    found = _LINE.fullmatch(line)
    if found is None:
        raise ValueError(f"{line!r} is no option: names, then values in braces")
    names, choices = found.groups()
    return Option(names=tuple(names.split()), choices=tuple(choices.split(",")) if choices else ())


def by_name(options: Sequence[Option]) -> Mapping[str, Option]:
    """Give every option by each of its names."""
    return {name: option for option in options for name in option.names}


def main(family: str) -> None:
    """Write the list of a family from the parser that is importable here."""
    from megatron.training.arguments import add_megatron_arguments

    options = options_of(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    lines = sorted(map(str, options))
    (FOLDER / f"megatron-{family}.txt").write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
