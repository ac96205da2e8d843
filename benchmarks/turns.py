"""Two programs that are alive at once and measure in turn, so that a slow moment of the machine hits both.

Processes that are started for each measurement differ more from start to start than the changes that are looked for.
Here both are started, warm up, and then wait; one at a time is told to measure and answers with its figures.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

Figures = Mapping[str, float]
_TIMEOUT_S = 900.0


def environment_of(tree: Path) -> dict[str, str]:
    """Return what a benchmark of a tree needs: that tree's product, and one thread."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def measure_in_turn(address: str, measure: Callable[[], Figures]) -> None:
    """Measure whenever it is this program's turn, until no more is wanted. Collective, if there is a group.

    Args:
        address: given by :func:`in_turn`.
        measure: called on all ranks of the program; the figures of rank 0 count.
    """
    has_others = dist.is_initialized()
    connection = Client(address) if not has_others or dist.get_rank() == 0 else None
    while True:
        goes_on = torch.tensor(connection.recv() if connection is not None else True)
        if has_others:  # they wait for rank 0, which waits for its turn
            dist.broadcast(goes_on, src=0)
        if not goes_on:
            return
        figures = measure()
        if connection is not None:
            connection.send(dict(figures))


def in_turn(programs: Sequence[tuple[Path, Sequence[str]]], num_turns: int) -> list[Figures]:
    """Start programs, let them measure in turn, and return the median of each figure of each.

    Who is first changes from turn to turn.

    Args:
        programs: for each program the folder with the product and the benchmarks, and the arguments of its command, to
            which ``--turns ADDRESS`` is added.
        num_turns: number of turns of each program.
    """
    found: list[defaultdict[str, list[float]]] = [defaultdict(list) for _ in programs]
    with ExitStack() as stack:
        started = [_Program(stack, tree, words) for tree, words in programs]
        for number in range(num_turns):
            for place in range(len(started)):
                index = (place + number) % len(started)
                for name, figure in started[index].measure().items():
                    found[index][name].append(figure)
        for program in started:
            program.connection.send(False)
    return [{name: statistics.median(values) for name, values in own.items()} for own in found]


class _Program:
    """A program that has started and is warm; what it prints is shown if it fails."""

    def __init__(self, stack: ExitStack, tree: Path, words: Sequence[str]) -> None:
        self._name = f"{' '.join(words)} in {tree}"
        own = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(socket.create_server(str(own / "turns"), family=socket.AF_UNIX))
        server.settimeout(1.0)
        self._output = own / "output"
        output = stack.enter_context(self._output.open("wb"))
        command = [*words, "--turns", str(own / "turns")]
        self._process = subprocess.Popen(command, cwd=tree, env=environment_of(tree), stdout=output, stderr=output)
        stack.callback(_end, self._process)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while self._process.poll() is None and time.monotonic() < deadline_s:
            with suppress(TimeoutError):
                self.connection = stack.enter_context(Connection(server.accept()[0].detach()))
                return
        self._fail("did not get ready")

    def measure(self) -> Figures:
        """Let it measure once."""
        try:
            self.connection.send(True)
            if self.connection.poll(_TIMEOUT_S):
                return self.connection.recv()
        except (EOFError, ConnectionError):
            self._fail("ended while it measured")
        self._fail(f"did not measure within {_TIMEOUT_S:g} s")

    def _fail(self, what: str) -> NoReturn:
        _end(self._process)  # what it says last may come after it has closed the connection
        sys.exit(f"{self._name} {what}:\n{self._output.read_text(errors='replace')[-3000:]}")


def _end(program: subprocess.Popen[bytes]) -> None:
    """Wait for a program that is done; one that is not, because the other failed, is ended."""
    try:
        program.wait(timeout=30)
    except subprocess.TimeoutExpired:
        program.terminate()
        program.wait()
