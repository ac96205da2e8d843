"""Find the name that a misspelt word stands for."""

from __future__ import annotations

from collections.abc import Iterable

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
