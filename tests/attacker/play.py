"""Tries generated inputs in processes of their own: no crash, no hang, no memory beyond the bound, one line or nothing.

python -m tests.attacker.play [--only NAME] [--first N] [--number N] [--seed S]      prints what is wrong, as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import math
import multiprocessing
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.attacker.inputs import Inputs
from tests.support.pace import pace
from vtp_plugin.errors import VtpError

DEFAULT_NUMBER = 500
FULL_NUMBER = 20_000
_MOST_PROBLEMS = 5  # of a task: then it is clear
_A_TASK = 100  # inputs
_AT_ONCE = 6  # tasks: most of their time they wait
_MOST_CHARACTERS = 8000
_ENDED = "the process ended with {}"
_WAITED = 6.0  # times the limit may pass on the clock: other processes take their share
_SPARE_BYTES = 4 << 30  # of addresses, for stacks and arenas of threads


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A place that reads bytes of another site, or several that do so by one function.

    Attributes:
        name: what is read.
        places: of the sources, as :mod:`tests.rules.read_places` finds them.
        make: makes an input.
        take: gives it to the plugin, as a rank would; it returns, or raises an error of the plugin.
        limit_s: how many seconds of the processor reading one input may take; on the clock it may wait
            six times as long.
        bound_bytes: how much memory.
        may_exit: whether the plugin may end the process, with status 1.
    """

    name: str
    places: Sequence[str]
    make: Callable[[Inputs], Any]
    take: Callable[[Any], object]
    limit_s: float = 10.0
    bound_bytes: int = 384 << 20
    may_exit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An input that does what it must not.

    Attributes:
        number: number of the input.
        text: what happens.
    """

    number: int
    text: str


def play(entry: Entry, numbers: Sequence[int], seed: int = 0) -> list[Problem]:
    """Try inputs of an entry; each process ends with the first input that is wrong, and a new one goes on."""
    found: list[Problem] = []
    left = [*numbers]
    while left and len(found) < _MOST_PROBLEMS:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _play_here(entry, left, seed, writer)
        os.close(writer)
        at, problem = _watch(reader, child, entry.limit_s * _WAITED)
        if entry.may_exit and problem == _ENDED.format(1):
            problem = ""
        if problem == _ENDED.format(-signal.SIGXCPU):
            problem = f"over {entry.limit_s:.0f} s of the processor"
        os.close(reader)
        if problem:
            found.append(Problem(number=left[at], text=problem))
        left = left[at + 1 :]
    return found


def _watch(reader: int, child: int, limit_s: float) -> tuple[int, str]:
    """Follow a process; return the place of the input at which it stood last, and what was wrong with it."""
    said, at = b"", 0
    while True:
        ready, _, _ = select.select([reader], [], [], limit_s)
        # How busy the machine is costs a tenth of a second to find out: it is asked only now.
        if not ready and not select.select([reader], [], [], limit_s * (pace() - 1.0))[0]:
            os.kill(child, signal.SIGABRT)  # its faulthandler shows where it is
            os.waitpid(child, 0)
            return at, f"no end within {limit_s:.0f} s"
        data = os.read(reader, 1 << 16)
        if not data:
            break
        said += data
        *lines, said = said.split(b"\n")
        for line in lines:
            if line.isdigit():
                at = int(line)
            else:
                os.waitpid(child, 0)
                return at, json.loads(line)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return at, "" if status == 0 else _ENDED.format(status)


def _play_here(entry: Entry, numbers: Sequence[int], seed: int, writer: int) -> None:
    """Try inputs until one is wrong, and end this process."""
    seen = os.dup(2)
    faulthandler.enable(seen)
    faulthandler.register(signal.SIGXCPU, seen, chain=True)
    with contextlib.suppress(BaseException):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        limit = _address_bytes() + entry.bound_bytes + _SPARE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for at, number in enumerate(numbers):
            os.write(writer, b"%d\n" % at)
            if problem := _try(entry, number, seed):
                os.write(writer, json.dumps(problem).encode() + b"\n")
                os._exit(0)
        os._exit(0)
    os._exit(70)


def _try(entry: Entry, number: int, seed: int) -> str:
    """Try one input; return what is wrong. What is too slow ends this process by SIGXCPU."""
    made = input_of(entry, number, seed)
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(used.ru_utime + used.ru_stime + entry.limit_s)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, resource.RLIM_INFINITY))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: what made the input is not counted
    begin_bytes = _peak_bytes()
    problem = _take(entry, made)
    taken_bytes = _peak_bytes() - begin_bytes
    if not problem and taken_bytes > entry.bound_bytes:
        problem = f"{taken_bytes >> 20} MiB of memory; {entry.bound_bytes >> 20} at most"
    return problem


def _take(entry: Entry, made: Any) -> str:
    try:
        entry.take(made)
    except VtpError as error:
        line = str(error)
        if not line or len(line) > _MOST_CHARACTERS or not line.isprintable():
            return f"{type(error).__name__} is no plain line: {ascii(line[:300])}, {len(line)} characters"
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {ascii(str(error))[:300]}"
    return ""


def input_of(entry: Entry, number: int, seed: int = 0) -> Any:
    """Make an input of an entry."""
    return entry.make(Inputs(Random(f"{seed} {entry.name} {number}")))


def _address_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def _task(task: tuple[int, Sequence[int], int]) -> tuple[int, list[Problem], float]:
    """Try some inputs of an entry; return its place, what was wrong, and the seconds of processors."""
    from tests.attacker.entries import ENTRIES

    place, numbers, seed = task
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = play(ENTRIES[place], numbers, seed)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return place, found, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(argv: Sequence[str]) -> int:
    """Play as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", action="append")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--number", type=int, default=DEFAULT_NUMBER)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    from tests.attacker.entries import ENTRIES

    numbers = range(given.first, given.first + given.number)
    tasks = [
        (place, numbers[at : at + _A_TASK], given.seed)
        for place, entry in enumerate(ENTRIES)
        if given.only is None or entry.name in given.only
        for at in range(0, len(numbers), _A_TASK)
    ]
    problems: dict[str, list[str]] = {}
    took_s: dict[str, float] = {}  # seconds of processors
    gc.freeze()  # each input's process is forked: no collection there looks at what was imported
    with multiprocessing.get_context("fork").Pool(_AT_ONCE) as pool:
        for place, found, used_s in pool.imap(_task, tasks):
            name = ENTRIES[place].name
            took_s[name] = round(took_s.get(name, 0.0) + used_s, 3)
            for one in found:
                problems.setdefault(name, []).append(f"input {one.number}: {one.text}")
                print(f"{name}: input {one.number}: {one.text}", file=sys.stderr, flush=True)
    places = {entry.name: [*entry.places] for entry in ENTRIES}
    print(json.dumps({"problems": problems, "took_s": took_s, "places": places}, indent=1))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
