"""Small things about text: what is printable, typos, enums, versions."""

from __future__ import annotations

import inspect
import re
import shutil
import sysconfig
from collections.abc import Iterable
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Final

MOST_CHARACTERS = 2000
"""So much of a text of another rank is shown, kept or passed on."""
_CUT = " ... (cut)"


def argument_of(flag: str) -> str:
    """Name the argument that argparse makes of a flag.

    >>> argument_of("--vtp-size-list")
    'vtp_size_list'
    """
    return flag.removeprefix("--").replace("-", "_")


def said_of_attributes(kind: type) -> dict[str, str]:
    r"""Read what a class says of its attributes, by their names.

    >>> class Box:
    ...     '''A box.
    ...
    ...     Attributes:
    ...         lid: What closes
    ...             it.
    ...     '''
    >>> said_of_attributes(Box)
    {'lid': 'What closes it.'}
    """
    section = (inspect.getdoc(kind) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def plain(text: str) -> str:
    r"""Write out every character that is not to be seen, but for ends of lines and tabs.

    Whoever wrote a text could else clear a terminal, change its title, hide or forge lines with it.

    >>> plain("a\x1b[2Jb\n\u202ec\x07")
    'a\\x1b[2Jb\n\\u202ec\\x07'
    """
    if text.isprintable():
        return text
    # A long text is mostly lines without any.
    return "\n".join(line if line.isprintable() else _written_out(line) for line in text.split("\n"))


def _written_out(line: str) -> str:
    return "".join(c if c.isprintable() or c == "\t" else c.encode("unicode_escape").decode() for c in line)


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Make one plain line of a text, and cut it.

    >>> one_line("two\nlines\x1b[2J"), one_line("x" * 30, most=20)
    ('two lines\\x1b[2J', 'xxxxxxxxxx ... (cut)')
    """
    # Before it is joined: whoever wrote a text of many MiB has it copied only so far.
    line = " ".join(plain(text[: most + 1]).split())
    if len(text) <= most and len(line) <= most:
        return line
    return f"{line[: most - len(_CUT)]}{_CUT}"


def in_digits(value: float, digits: int = 4) -> str:
    """Write a number with so many digits as people do: as ``g`` does, but without an exponent.

    >>> in_digits(95030.4), in_digits(1.5), in_digits(1234567.8, 6), in_digits(0.00001234), in_digits(float("inf"))
    ('95,030', '1.5', '1,234,570', '0.00001234', 'inf')
    """
    text = f"{value:.{digits}g}"
    return f"{Decimal(text):,f}" if "e" in text else text


class TextEnum(str, Enum):
    """Base of enumerations whose members are texts and print as such.

    >>> class Colour(TextEnum):
    ...     RED = "red"
    >>> str(Colour.RED), f"{Colour.RED:>4}", Colour.RED == "red"
    ('red', ' red', True)
    """

    __str__ = str.__str__
    __format__ = str.__format__


MAX_TYPOS = 2
"""A word that differs from a name in so many letters at most is taken for a misspelt name."""


def num_typos(word: str, other: str) -> int:
    """Count the letters to insert, remove or change to turn one word into another (Levenshtein distance).

    >>> num_typos("--vtp-size-lsit", "--vtp-size-list"), num_typos("--seq-length", "--encoder-seq-length")
    (2, 8)
    """
    row = list(range(len(other) + 1))
    for number, letter in enumerate(word, start=1):
        before, row = row, [number]
        for column, wanted in enumerate(other):
            row.append(min(before[column] + (letter != wanted), before[column + 1] + 1, row[column] + 1))
    return row[-1]


def nearest(word: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that a word is most likely a misspelling of; none if it is near no name.

    >>> nearest("--vtp-size-lst", ("--vtp-size-list", "--vtp-sites")), nearest("x", ("y1234",))
    (('--vtp-size-list',), ())
    """
    # The lengths alone say most of it: Megatron has over a thousand flags.
    typos = {name: num_typos(word, name) for name in names if abs(len(name) - len(word)) <= MAX_TYPOS}
    least = min(typos.values(), default=MAX_TYPOS + 1)
    return tuple(name for name, number in typos.items() if number == least <= MAX_TYPOS)


def question(word: str, names: Iterable[str], *, most: int = 8) -> str:
    """Return the end of a message about an unknown word: which names may be meant, or nothing.

    Args:
        word: the unknown word.
        names: names that are known.
        most: nothing is returned if more names than these are equally near.

    >>> question("sliecd", ("auto", "sliced")), question("gpu", ("cuda", "npu", "cpu"), most=1)
    ('; do you mean sliced?', '')
    """
    near = nearest(word, names)
    return f"; do you mean {' or '.join(near)}?" if 0 < len(near) <= most else ""


__version__ = "0.1.0"


MODULE: Final = "python -m vtp_plugin"
"""The name that works in every environment with the plugin; a launcher knows no other."""
_SCRIPT: Final = "vtp"


def own_command() -> str:
    """Return ``vtp`` where it is on the path and belongs to this environment, else ``python -m vtp_plugin``."""
    found = shutil.which(_SCRIPT)
    own = Path(sysconfig.get_path("scripts")).resolve()
    return _SCRIPT if found is not None and Path(found).parent.resolve() == own else MODULE
