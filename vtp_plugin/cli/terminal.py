"""What commands print: colour, tables and a bar on a terminal, by the package rich where it is installed.

Whatever is not a terminal gets plain text, byte for byte the same with rich and without it. Texts of others, such as
the name of a tensor, are never read as rich's markup, and hold no character that a terminal obeys.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, TextIO, cast

from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.util.text import plain

# What the beginning of a line says of all of it; the first that fits counts.
_STYLES: Final = tuple(
    (re.compile(pattern), style)
    for pattern, style in (
        (r"verdict: fine$|nothing was slow on its own|.* is intact: |.*: equal to the last bit$|wrote ", "green"),
        (r"(verdict|problem): |vtp_plugin: error: |.*\b(do|does) not fit\b", "bold red"),
        (r"warning: |bottleneck |(slow on its own|.*disturbed: step) |.*: \d+ tensors, \d+ differ$", "yellow"),
    )
)
_LEAST_S = 0.1  # between two states of a bar


class Tell(Protocol):
    """Called as work is done."""

    def __call__(self, number: float, text: str = "") -> None:
        """Report more work that is done.

        Args:
            number: number of bytes, or of whatever the bar counts.
            text: text to show behind the bar.
        """


class Output:
    """Standard output of a command; characters that a terminal obeys are written out.

    Args:
        stream: where it goes.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""  # a line whose end has not come yet
        self.console = _console(stream)

    def write(self, text: str) -> int:
        """Write a text; on a terminal each line as soon as it is complete, in its style."""
        if self.console is None:
            self._stream.write(plain(text))
        else:
            *lines, self._begun = (self._begun + plain(text)).split("\n")
            for line in lines:
                _print_styled(self.console, line)
        return len(text)

    def end(self) -> None:
        """Write what no end of a line came for."""
        begun, self._begun = self._begun, ""
        self._stream.write(begun)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def on_standard_output() -> Iterator[None]:
    """Let what a block prints be plain or styled, as the output is."""
    output = Output(sys.stdout)
    with contextlib.redirect_stdout(cast(Any, output)):
        try:
            yield
        finally:
            output.end()


def print_line_of_error(line: str) -> None:
    """Print a line to standard error, in its style on a terminal."""
    console = _console(sys.stderr)
    if console is None:
        print(plain(line), file=sys.stderr, flush=True)
    else:
        _print_styled(console, plain(line))


def show(parts: Iterable[str | TextTable]) -> None:
    """Print lines and tables to standard output."""
    console = _console_of_output()
    for part in parts:
        if isinstance(part, str):
            print(part)
        elif console is None:
            print("\n".join(part.lines))
        else:
            console.print(_rich_table(part))


@contextlib.contextmanager
def progress(number: float, what: str, *, is_bytes: bool = True) -> Iterator[Tell]:
    """Show on a terminal how far a command is.

    Args:
        number: amount of all the work.
        what: name of the work, for the bar.
        is_bytes: whether the number counts bytes; else pieces of work.

    Yields:
        A function to call with the amount of each piece of work that is done.
    """
    # One console for both, so that lines are printed above the bar.
    console = _console_of_output() or _console(sys.stderr)
    if console is None:
        yield lambda number, text="": None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True) if is_bytes else TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,  # no thread draws it, which would disturb what is timed
        transient=True,
        redirect_stdout=False,  # what others print goes where they print it
        redirect_stderr=False,
    ) as bar:
        task, shown_s = bar.add_task(plain(what), total=number, text=""), 0.0
        bar.refresh()

        def tell(number: float, text: str = "") -> None:
            nonlocal shown_s
            bar.advance(task, number)
            if text:
                bar.update(task, text=plain(text))
            if time.monotonic() - shown_s >= _LEAST_S:
                bar.refresh()
                shown_s = time.monotonic()

        yield tell


def _console(stream: TextIO) -> Any:
    """Give a console of rich; None if there is none, or if the stream is no terminal, whatever FORCE_COLOR says."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def _console_of_output() -> Any:
    return getattr(sys.stdout, "console", None)


def _print_styled(console: Any, line: str) -> None:
    from rich.text import Text

    style = next((style for pattern, style in _STYLES if pattern.match(line)), "")
    console.print(Text(line, style=style), soft_wrap=True)


def _rich_table(table: TextTable) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=SIMPLE, pad_edge=False)
    for number, name in enumerate(table.header):
        cells = [row[number] for row in table.rows]
        is_number = all(re.match(r"[-+]?[\d.,]+( |$)|-?$", cell) for cell in cells)
        shown.add_column(Text(plain(name)), justify="right" if is_number else "left", overflow="fold")
    for number, row in enumerate(table.rows):
        shown.add_row(*(Text(plain(cell)) for cell in row), style="bold yellow" if number == table.marked else "")
    return shown
