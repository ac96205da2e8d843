"""The plugin's lines in what a process printed, wherever torch's and Megatron's own lines stand."""

from __future__ import annotations

import re

_ERROR = re.compile(r"\[vtp(?: rank \d+)?\] error: .*")


def error_lines(output: str) -> list[str]:
    """Give our error lines in their order, without what torch puts in front of a line of an exception hook.

    Other libraries log from threads and at their end, so our line need not be the last one.
    """
    return _ERROR.findall(output)


def error_line(output: str) -> str:
    """Give our last error line, or nothing."""
    return (error_lines(output) or [""])[-1]
