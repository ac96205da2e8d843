"""A bar that shows how far a command is."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Protocol


class Tell(Protocol):
    """What is called as work is done."""

    def __call__(self, number: float, text: str = "") -> None:
        """Add to what is done.

        Args:
            number: of bytes, or of whatever the bar counts.
            text: shown behind the bar.
        """


@contextlib.contextmanager
def progress(number: float, what: str, *, is_bytes: bool = True) -> Iterator[Tell]:
    """Show a bar on a terminal, if the package tqdm is there.

    Args:
        number: of all the work.
        what: is done.
        is_bytes: the number counts bytes; else pieces of work.

    Yields:
        What is called with the number of each piece of work.
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
