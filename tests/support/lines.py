"""The plugin's lines in what a process printed, wherever torch's and Megatron's own lines stand."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

_ERROR = re.compile(r"(?:\[vtp(?: rank \d+)?\]|vtp_plugin:) error: .*")


def error_lines(output: str) -> list[str]:
    """Give our error lines in their order, without what torch puts in front of a line of an exception hook.

    Other libraries log from threads and at their end, so our line need not be the last one.
    """
    return _ERROR.findall(output)


def error_line(output: str) -> str:
    """Give our last error line, or nothing."""
    return (error_lines(output) or [""])[-1]


def warnings(output: str) -> list[str]:
    """Give our warnings in their order, each as one line, but for what every run says with an older Megatron."""
    found: list[str] = []
    is_open = False
    for line in output.splitlines():
        ours = re.fullmatch(r"\[vtp(?: rank \d+)?\] (warning: )?(.*)", line)
        if ours and ours[1]:
            found.append(ours[2])
        elif ours and is_open and ours[2].startswith("    "):
            found[-1] += f" {ours[2].strip()}"
        is_open = bool(ours and (ours[1] or (is_open and ours[2].startswith("    "))))
    return [line for line in found if not line.startswith("not yet run with Megatron ")]


def only_line_of_error(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    """Run a command that ends with exit code 2, prints nothing else, and return the only line of its error."""
    from vtp_plugin.cli import main

    with pytest.raises(SystemExit) as left:
        main(words)
    printed = capsys.readouterr()
    assert left.value.code == 2 and printed.out == "", printed
    (line,) = printed.err.splitlines()
    return line
