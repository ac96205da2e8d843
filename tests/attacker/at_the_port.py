"""Strangers at the port of a run that starts: garbage, half-open and slow connections, and the store's own protocol.

Two ranks meet at a store, while strangers talk to it: they start, or end with one line within their timeout, and the
rank that keeps the store takes no more memory than a few times what was posted; the memory is torch's before 2.8.

python -m tests.attacker.at_the_port [--number N] [--seed S]      prints what is wrong, as JSON
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryFile
from typing import IO

from tests.attacker.inputs import Inputs
from tests.support.pace import pace
from tests.support.pool import free_port
from vtp_plugin.errors import VtpError
from vtp_plugin.runtime.health.meeting_store import is_server_bounded
from vtp_plugin.session.ranks import AllRanks

HOST = "127.0.0.1"
_A_ROUND = 50  # conversations
_AT_ONCE = 5  # rounds, which wait most of their time: the usual ten are two turns
_TIMEOUT_S = 4.0
_SLACK_S = 40.0  # to start a process, and to end one, beside others
_BOUND_BYTES = 256 << 20
_MAGIC = struct.pack("<BI", 0, 0x3C85F7CE)
_STATEMENT = {"says": {"sizes": "1,2"}, "error": "", "is_final": False}
_VERDICT = {"text": "", "name": None, "is_missing": False, "is_final": False, "speakers": []}
_NOTICES = {"num_calls": 0, "leaver": None, "failure": None}
_KEYS = [
    *(f"vtp/0/agree/start/1/{key}" for key in ("0", "1", "verdict", "missing", "farewell")),
    *(f"vtp/0/agree/start/rounds of {rank}" for rank in (0, 1)),
    *("vtp/0/monitor/name", "vtp/0/folder/run", "init/", "worker_count", "", "x" * 70_000, "\x00", "é"),
]
_HELLOS = [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n", b"\x00" * 4096]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """A rank in a process of its own.

    Attributes:
        process: its number.
        err: what it prints.
    """

    process: int
    err: IO[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of a round.

    Attributes:
        problems: what was wrong.
        started: number of ranks that started.
        ended: number of ranks that ended with a line instead.
    """

    problems: list[str]
    started: int
    ended: int


def start_rank(rank: int, port: int) -> Rank:
    """Start a rank that meets the other one, says that it has, and ends."""
    err = TemporaryFile()  # noqa: SIM115  whoever waits for the rank reads it
    child = os.fork()
    if child:
        return Rank(process=child, err=err)
    with contextlib.suppress(BaseException):
        os.dup2(err.fileno(), 2)
        os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), LOCAL_RANK=str(rank))
        place = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        ranks = AllRanks(lambda: _TIMEOUT_S, lambda: None)
        try:
            ranks.meet(place, lambda: {"sizes": "1,2"})
            os.write(2, b"met\n")
            ranks.stop()
        except VtpError as error:
            os.write(2, f"line: {error}\n".encode(errors="backslashreplace"))
        except BaseException as error:
            os.write(2, f"raw: {type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
        os._exit(0)
    os._exit(70)


def conversation(inputs: Inputs) -> tuple[list[bytes], bool]:
    """Make what a stranger sends, piece by piece, and whether the connection then stays open."""
    kind = inputs.random.randrange(8)
    stays = inputs.chance(0.2)
    if kind == 0:
        return [inputs.random.choice([inputs.garbage(), inputs.random.choice(_HELLOS)])], stays
    if kind == 1:
        return [], stays
    messages = [_message(inputs) for _ in range(inputs.random.choice([1, 1, 3, 20]))]
    data = b"".join([_MAGIC if inputs.chance(0.9) else inputs.garbage(), *messages])
    if kind == 2:
        data = inputs.damaged(data)
    if kind == 3:  # slowly, and never to the end
        return [data[at : at + 1] for at in range(min(len(data) - 1, 12))], True
    return [data], stays


def _message(inputs: Inputs) -> bytes:
    """Make a message of the store's protocol; lengths and kinds need not be right."""
    kind = (
        inputs.random.randrange(22)
        if inputs.chance(0.3)
        else inputs.random.choice([1, 1, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11])
    )
    key = _text(inputs, inputs.random.choice(_KEYS).encode())
    post = _text(inputs, inputs.post(_STATEMENT, _VERDICT, _NOTICES))
    number = struct.pack("<q", inputs.whole())
    few = struct.pack("<Q", inputs.random.choice([0, 1, 2, 1 << 20, 1 << 40, (1 << 64) - 1]))
    bodies = {1: key + post, 2: key + _text(inputs, b"") + post, 3: key, 4: key + number, 5: few + key, 6: few + key}
    bodies |= {8: key, 9: key + post, 10: few + key, 11: few + key + post}
    return bytes([kind]) + bodies.get(kind, inputs.garbage())


def _text(inputs: Inputs, text: bytes) -> bytes:
    length = len(text) if inputs.chance(0.95) else inputs.whole() & (1 << 64) - 1
    return struct.pack("<Q", length) + text


def play_round(number: int, seed: int) -> Round:
    """Let two ranks start while strangers talk to the store."""
    random = Random(f"{seed} port {number}")
    inputs, port = Inputs(random), free_port()
    kept: list[socket.socket] = []
    sent = 0
    begin_s = time.monotonic()
    first = start_rank(0, port)
    for at in range(_A_ROUND):
        if at == _A_ROUND * 3 // 4:
            second = start_rank(1, port)
        pieces, stays = conversation(inputs)
        sent += sum(map(len, pieces))
        with contextlib.suppress(OSError):
            kept += _talk(port, pieces, stays=stays, until_s=begin_s + _SLACK_S)
    problems: list[str] = []
    started = 0
    for rank, each in enumerate((first, second)):
        problem, has_met = _end_of(each, begin_s, sent)
        problems += [f"round {number}, rank {rank}: {problem}"] if problem else []
        started += has_met
    for each in kept:
        each.close()
    return Round(problems=problems, started=started, ended=2 - started - len(problems))


def _talk(port: int, pieces: Sequence[bytes], *, stays: bool, until_s: float) -> list[socket.socket]:
    """Connect as soon as somebody listens, and send; return the connection if it stays."""
    while True:
        try:
            connected = socket.create_connection((HOST, port), timeout=1.0)
            break
        except ConnectionRefusedError:
            if kept_off(until_s):
                return []
    for piece in pieces:
        connected.sendall(piece)
    if stays:
        return [connected]
    connected.close()
    return []


def kept_off(until_s: float) -> bool:
    """Wait a little; tell whether it was too long. A rank that has ended listens no more."""
    time.sleep(0.01)
    return time.monotonic() > until_s


def _end_of(rank: Rank, begin_s: float, sent: int) -> tuple[str, bool]:
    """Wait for the end of a rank; return what was wrong, and whether it had met the other one."""
    limit_s = (2 * (1.1 * _TIMEOUT_S + 1.0) + _SLACK_S) * pace()
    while True:
        found, status, used = os.wait4(rank.process, os.WNOHANG)
        if found:
            break
        if time.monotonic() - begin_s > limit_s:
            os.kill(rank.process, 9)
            os.waitpid(rank.process, 0)
            return f"no end within {limit_s:.0f} s", False
        time.sleep(0.02)
    rank.err.seek(0)
    said = rank.err.read().decode(errors="backslashreplace")
    code = os.waitstatus_to_exitcode(status)
    if is_server_bounded() and (used.ru_maxrss << 10) > _own_bytes() + _BOUND_BYTES + 4 * sent:
        return f"{used.ru_maxrss >> 10} MiB of memory", False
    if code not in (0, 1):
        return f"it ended with {code}: {ascii(said[-300:])}", False
    lines = [line for line in said.splitlines() if line.startswith(("met", "line: ", "raw: ", "[vtp "))]
    if not lines or lines[-1].startswith("raw: "):
        return f"no line: {ascii(said[-300:])}", False
    if not lines[-1].isprintable() or len(lines[-1]) > 8000:
        return f"no plain line: {ascii(lines[-1][:300])}", False
    return "", "met" in lines


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main(argv: Sequence[str]) -> int:
    """Play as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    rounds = range(given.first, given.first + -(-given.number // _A_ROUND))
    with multiprocessing.get_context("fork").Pool(_AT_ONCE) as pool:
        played = pool.starmap(play_round, [(number, given.seed) for number in rounds], chunksize=1)
    problems = [problem for each in played for problem in each.problems]
    number = {"started": sum(each.started for each in played), "with a line": sum(each.ended for each in played)}
    print(json.dumps({"problems": problems, **number}, indent=1))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
