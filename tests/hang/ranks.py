"""Ranks as plain processes: start, watch, stop and kill them without a launcher."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore

from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.lines import error_line
from tests.support.pace import pace
from tests.support.pool import ENVIRONMENT, HOST, free_port
from vtp_plugin.runtime.health.store import Topic, connect_again, part_of

VICTIM = str(Path(__file__).with_name("victim.py"))
_ENVIRONMENT = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore", "PYTHONPATH": PYTHON_PATH}


@dataclass(slots=True, kw_only=True)
class Rank:
    """A process of the run. ``process`` is None when the server forked it; its status comes by file then."""

    rank: int
    pid: int
    output: Path
    process: subprocess.Popen[bytes] | None = None

    def status(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        if self.process is not None:
            return self.process.poll()
        path = Path(f"{self.output}.status")
        return int(path.read_text()) if path.exists() else None

    def send(self, number: signal.Signals) -> None:
        """Send a signal if the process has not ended."""
        if self.status() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self) -> None:
        """Kill the process, stopped or not, and wait until it is gone; its children too.

        A checkpoint save starts helpers of 450 MB, which outlive a process that is killed.
        """
        self.send(signal.SIGKILL)
        self.send(signal.SIGCONT)
        wait_until(lambda: self.status() is not None, 60.0, f"rank {self.rank} to die")
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def text(self) -> str:
        """Return standard output and error so far."""
        return self.output.read_text() if self.output.exists() else ""

    def error_line(self) -> str:
        """Return our last error line, or nothing; see :mod:`tests.support.lines`."""
        return error_line(self.text())


def wait_until(is_true: object, limit_s: float, what: str) -> float:
    """Wait for a condition and return how long it took."""
    assert callable(is_true)
    begin_s = time.monotonic()
    while not is_true():
        assert time.monotonic() - begin_s < limit_s, f"waited {limit_s} s for {what}"
        time.sleep(0.02)
    return time.monotonic() - begin_s


class Server:
    """A process that has imported everything and forks ranks."""

    def __init__(self, log: Path) -> None:
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, VICTIM, "serve"],
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
            )

    def start(self, rank: int, env: dict[str, str], script: str, arguments: Sequence[str], output: Path) -> Rank:
        """Fork a rank and return it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"env": env, "script": script, "arguments": list(arguments), "output": str(output)}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return Rank(rank=rank, pid=int(self._process.stdout.readline()), output=output)

    def close(self) -> None:
        """End the server; the kernel kills what it left."""
        self._process.communicate(timeout=60)


class Run:
    """The ranks of one run; leave the context to kill what is left of them.

    Args:
        folder: for outputs.
        server: forks the ranks; None starts each as a script of its own.
        agent_store: the parent keeps the store, as torchrun's agent does; otherwise rank 0 does.

    Attributes:
        pace: factor for the limits of this run, see :func:`tests.support.pace.pace`.
    """

    def __init__(self, folder: Path, server: Server | None, *, world_size: int, agent_store: bool = False) -> None:
        self.pace = pace()
        self._folder = folder
        self._server = server
        self._world_size = world_size
        self._store = None
        self._port = free_port()
        self._is_agent = agent_store
        if agent_store:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
            self._port = self._store.port
        self.ranks: dict[int, Rank] = {}

    def stranger(self) -> PrefixStore:
        """Return what somebody finds at the port of the store that rank 0 keeps, where the monitors post."""
        store = TCPStore(HOST, self._port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        own = connect_again(PrefixStore("vtp/0", store))  # reads the random name
        return PrefixStore("1", part_of(own, Topic.WATCH))

    def start(self, rank: int, *arguments: str, script: str = VICTIM, env: dict[str, str] | None = None) -> Rank:
        """Start one rank."""
        own_env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(self._port),
            **({"TORCHELASTIC_USE_AGENT_STORE": "True"} if self._is_agent else {}),
            **(env or {}),
        }
        output = self._folder / f"rank{rank}"
        arguments = ("--folder", str(self._folder), *arguments)
        if self._server is not None:
            self.ranks[rank] = self._server.start(rank, own_env, script, arguments, output)
        else:
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, script, *arguments],
                    cwd=ROOT,
                    env={**os.environ, **_ENVIRONMENT, **own_env},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.ranks[rank] = Rank(rank=rank, pid=process.pid, output=output, process=process)
        return self.ranks[rank]

    def reached(self, rank: int) -> None:
        """Wait until a rank is at its moment."""
        path, limit_s = self._folder / f"{rank}.reached", 300.0 * self.pace
        wait_until(lambda: path.exists() or self.ranks[rank].status() is not None, limit_s, f"rank {rank} to be there")
        assert path.exists(), self.ranks[rank].text()

    def ended(self, ranks: Sequence[int], limit_s: float) -> dict[int, float]:
        """Wait for ranks to end by themselves; return the seconds that each took."""
        begin_s, took = time.monotonic(), {}
        while len(took) < len(ranks) and time.monotonic() - begin_s < limit_s:
            for rank in ranks:
                if rank not in took and self.ranks[rank].status() is not None:
                    took[rank] = time.monotonic() - begin_s
            time.sleep(0.02)
        left = [rank for rank in ranks if rank not in took]
        texts = "\n".join(f"--- rank {rank}\n{self.ranks[rank].text()[-3000:]}" for rank in left)
        assert not left, f"ranks {left} still run after {limit_s} s\n{texts}"
        return took

    def close(self) -> None:
        """Kill what is left."""
        for rank in self.ranks.values():
            rank.end()


@contextlib.contextmanager
def run(folder: Path, server: Server | None, *, world_size: int, agent_store: bool = False) -> Iterator[Run]:
    """Give a run and kill its ranks at the end."""
    whole = Run(folder, server, world_size=world_size, agent_store=agent_store)
    try:
        yield whole
    finally:
        whole.close()
