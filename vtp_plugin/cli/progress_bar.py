"""A bar that shows how far a command is."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Tell(Protocol):
    """Called as work is done."""

    def __call__(self, number: float, text: str = "") -> None:
        """Report more work that is done.

        Args:
            number: number of bytes, or of whatever the bar counts.
            text: text to show behind the bar.
        """


@contextlib.contextmanager
def progress(number: float, what: str, *, is_bytes: bool = True) -> Iterator[Tell]:
    """Show a bar on a terminal, if the package tqdm is there.

    Args:
        number: amount of all the work.
        what: name of the work, for the bar.
        is_bytes: whether the number counts bytes; else pieces of work.

    Yields:
        A function to call with the amount of each piece of work that is done.
    """
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda number, text="": None
        return
    unit = (
        {"unit": "B", "unit_scale": True, "unit_divisor": 1024} if is_bytes else {"bar_format": "{l_bar}{bar}{postfix}"}
    )
    with bar(total=number, desc=what, disable=None, file=sys.stderr, leave=False, **unit) as shown:  # None: a terminal

        def tell(number: float, text: str = "") -> None:
            if text:
                shown.set_postfix_str(text, refresh=False)
            shown.update(number)

        yield tell
