"""A bar that shows how far a command is."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(num_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, if the package tqdm is there.

    Args:
        num_bytes: of all the work.
        what: is done.

    Yields:
        What is called with the bytes of each piece of work.
    """
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ImportError:
        yield lambda count: None
        return
    options = {"unit": "B", "unit_scale": True, "unit_divisor": 1024, "file": sys.stderr, "leave": False}
    with bar(total=num_bytes, desc=what, disable=None, **options) as shown:  # None: only on a terminal
        yield shown.update
