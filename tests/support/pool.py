"""A pool of worker processes for tests that need several ranks over gloo.

Importing torch and Megatron costs seconds and hundreds of megabytes per process, so workers are forked from one process
that has imported them (``multiprocessing``'s fork server), live on between jobs and serve every world size: worker i is
rank i of each job. One job runs in three phases, all ranks together:

1. load: the workers get their environment and import the module of the job's function; not part of the job's timeout;
2. run: every worker calls the function;
3. clean up, after all ranks have returned: process groups are destroyed and the environment is put back.

A failure in any phase kills the workers of that job, since nothing is known about their state any more; the next job
starts fresh ones. The server of the rendezvous store lives in the parent, so that it outlasts every rank.

A job that calls ``parallel_state.initialize_model_parallel`` or sets other global state undoes that itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe, connection, get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tests.support.devices import device_of, environment
from tests.support.hosts import PYTHON_PATH, ROOT
from tests.support.pace import pace
from tests.support.pool_worker import serve

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Done = subprocess.CompletedProcess[str]
PRELOAD = "tests.support.pool_preload"
# Of every process of a test: one thread, gloo on the loopback device.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    **environment(),
    # Nothing is compiled, but torch 2.7 starts processes that would compile, in every rank.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Megatron 0.12 asks for it on every device.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
TIMES = "VTP_TEST_TIMES"
"""Variable with the file that keeps how long each test took. Jobs of pools are kept beside it, a line each."""
HOST = "127.0.0.1"
TIMEOUT_S = 300.0  # of every phase of a job: jobs take seconds, but twelve ranks beside twenty busy processes minutes
GRACE_S = 3.0  # on an idle machine, after the first failure, for the other ranks to return or to raise on their own
POLL_S = 0.1  # a death is seen by polling, as a grandchild may hold the connection open
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank failed; ``text`` is its traceback, the tail of its output, or the stacks of all its threads."""

    rank: int
    kind: Literal["raised", "died", "hung"]
    summary: str
    text: str


class PoolError(Exception):
    """A job failed: ``failures`` holds every rank that did not return, in rank order; the text shows them all."""

    def __init__(self, title: str, failures: Sequence[RankFailure]) -> None:
        self.failures = tuple(failures)
        parts = [f"--- rank {f.rank} {f.summary}\n{f.text.rstrip()}" for f in self.failures]
        super().__init__("\n".join([title, *parts]))


class Pool:
    """Up to ``max_workers`` processes, started when a job first needs them; they end when this process does."""

    def __init__(self, *, max_workers: int = 8) -> None:
        self._max_workers = max_workers
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="vtp-pool-")
        self._num_started = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that are alive, in rank order."""
        return tuple(worker.pid for worker in self._workers)

    def run(
        self,
        world_size: int,
        target: str,
        kwargs: Mapping[str, Any] | None = None,
        timeout_s: float = TIMEOUT_S,
        *,
        node_sizes: Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """Call a function on ``world_size`` ranks at once and return what each rank returned, in rank order.

        Arguments and results are pickled: return tensors as numpy arrays or CPU tensors.

        Args:
            world_size: number of ranks, at most ``max_workers``.
            target: ``"package.module:function"``, importable from the repository root.
            kwargs: keyword arguments of the function, the same on every rank.
            timeout_s: longest time for the call on all ranks; importing the module is not counted.
            node_sizes: ranks per node of the launcher that the environment describes; default one node.
            env: further environment variables, in force during import and call.

        Raises:
            PoolError: a rank raised, died or did not return in time; nothing of the job is left running.
        """
        if not 1 <= world_size <= self._max_workers:
            raise ValueError(f"world_size {world_size} is not within 1..{self._max_workers}, the size of the pool")
        begin_s = time.monotonic()
        workers = self._take(world_size)
        store = _store_server()
        env = {**_test_name(), **(env or {})}
        per_rank = [{**env, **launch} for launch in _launch_env(store.port, world_size, node_sizes)]
        try:
            self._phase(f"{target}: import", workers, [("load", target, e) for e in per_rank], TIMEOUT_S)
            results = self._phase(target, workers, [("run", dict(kwargs or {}))] * world_size, timeout_s)
            self._phase(f"{target}: clean-up", workers, [("clean_up",)] * world_size, TIMEOUT_S)
        except BaseException:  # also a time-out of pytest's and Ctrl-C, which leave the workers in the middle of a job
            self._discard(workers)
            raise
        _note_job(target, world_size, kwargs or {}, time.monotonic() - begin_s)
        return results

    def close(self) -> None:
        """End all workers and remove their files; a second call does nothing."""
        for worker in self._workers:
            worker.post(("exit",))
        deadline_s = time.monotonic() + 5.0
        for worker in self._workers:
            worker.stop(wait_s=max(0.0, deadline_s - time.monotonic()))
        self._workers.clear()
        self._folder.cleanup()

    def _take(self, world_size: int) -> list[_Worker]:
        """Return the first ``world_size`` workers; those that are missing or dead are started."""
        self._discard([worker for worker in self._workers if worker.returncode() is not None])
        while len(self._workers) < world_size:
            self._num_started += 1
            self._workers.append(_Worker(Path(self._folder.name) / f"worker{self._num_started}"))
        return self._workers[:world_size]

    def _discard(self, workers: Sequence[_Worker]) -> None:
        for worker in workers:
            worker.stop()
        self._workers = [worker for worker in self._workers if worker not in workers]

    def _phase(
        self, title: str, workers: Sequence[_Worker], messages: Sequence[tuple[object, ...]], timeout_s: float
    ) -> list[Any]:
        """Give worker i message i and return all answers; raise PoolError when one fails or is late."""
        start_s = time.monotonic()
        deadline_s = start_s + timeout_s
        for worker, message in zip(workers, messages, strict=True):
            worker.post(message)
        results: dict[int, Any] = {}
        failures: dict[int, RankFailure] = {}
        while waiting := [rank for rank in range(len(workers)) if rank not in results and rank not in failures]:
            if time.monotonic() > deadline_s:
                break
            for rank in _ready(workers, waiting):
                match workers[rank].answer():
                    case ("ok", value):
                        results[rank] = value
                    case ("raised", summary, text):
                        failures[rank] = RankFailure(rank=rank, kind="raised", summary=summary, text=text)
                    case _:
                        failures[rank] = workers[rank].death(rank)
            if failures:
                deadline_s = min(deadline_s, time.monotonic() + GRACE_S * pace())
        elapsed_s = time.monotonic() - start_s
        for worker in (workers[rank] for rank in waiting):
            worker.ask_for_stacks()
        failures.update({rank: workers[rank].hang(rank, elapsed_s) for rank in waiting})
        if failures:
            title = f"{title} failed on {len(failures)} of {len(workers)} ranks after {elapsed_s:.1f} s"
            raise PoolError(title, [failures[rank] for rank in sorted(failures)])
        return [results[rank] for rank in range(len(workers))]


def free_port() -> int:
    """Return a port for a process that binds it later, where its listening socket cannot be handed over.

    It is free now, no connection gets it, since the kernel gives those from 32768 up, and no other process of the tests
    as long as this one lives: each port has a mark, a name in Linux's abstract namespace, which ends with its process.
    """
    while True:
        port, mark = random.randrange(20000, 32768), socket.socket(socket.AF_UNIX)
        try:
            mark.bind(f"\0vtp-test-port-{port}")
            with socket.create_server((HOST, port)):
                mark.detach()
                return port
        except OSError:
            mark.close()


def run_code(code: str, *, world_size: int = 1, env: Mapping[str, str] | None = None) -> None:
    """Run code in processes that have imported torch and Megatron already, and that end with it; it may raise."""
    with Pool(max_workers=world_size) as own:
        own.run(world_size, "tests.support.pool_jobs:run_code", {"code": textwrap.dedent(code)}, env=env)


def forked_python(*words: str, cwd: Path | str = ROOT, env: Mapping[str, str] | None = None) -> Done:
    """Do what ``python WORDS`` does (a script, or ``-m MODULE``), in a process that has imported torch and Megatron.

    Args:
        words: of the command line.
        cwd: the working directory.
        env: all environment variables; by default those of this process.
    """
    kwargs = {"words": words, "cwd": str(cwd), "env": dict(os.environ if env is None else env)}
    with Pool(max_workers=1) as own:
        (ended,) = own.run(1, "tests.support.pool_jobs:be_python", kwargs)
    return subprocess.CompletedProcess(words, *ended)


def start_python(*words: str, timeout_s: float = 600.0, path: str = PYTHON_PATH) -> str:
    """Start a process of its own with these words, as a user does, and return what it prints; it must end well."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def init_gloo(timeout_s: float = TIMEOUT_S) -> int:
    """Join the job's gloo world as the default process group and return this rank; for use inside a job."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("default", store),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )
    return rank


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._log = folder / "output"
        self._stacks = folder / "stacks"
        self._log.touch()
        self._conn, child = Pipe()
        context = get_context("forkserver")
        context.set_forkserver_preload([PRELOAD])
        self._process = context.Process(target=serve, args=(child, str(self._log), str(self._stacks)))
        with child:
            self._process.start()
        self._log_start = 0

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def connection(self) -> connection.Connection[Any, Any]:
        return self._conn

    def returncode(self) -> int | None:
        return self._process.exitcode

    def post(self, message: tuple[object, ...]) -> None:
        """Send a message; a worker that is dead is found out when its answer is due."""
        if message[0] == "load":
            self._log_start = self._log.stat().st_size
        with contextlib.suppress(BrokenPipeError):
            self._conn.send_bytes(pickle.dumps(message))

    def answer(self) -> tuple[Any, ...] | None:
        """Return the worker's answer, or None when it died without one; only called when one of the two is there."""
        try:
            return pickle.loads(self._conn.recv_bytes()) if self._conn.poll() else None
        except (EOFError, ConnectionResetError):
            return None

    def death(self, rank: int) -> RankFailure:
        self._process.join(timeout=60.0)
        code = self._process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exited with {code}"
        return RankFailure(rank=rank, kind="died", summary=f"{how}; the end of its output:", text=self._log_tail())

    def ask_for_stacks(self) -> None:
        """Have faulthandler write the stacks of all threads; it does so even while the process blocks in C++."""
        if self.returncode() is None:
            os.kill(self.pid, signal.SIGUSR1)

    def hang(self, rank: int, elapsed_s: float) -> RankFailure:
        """Describe a worker that was asked for its stacks."""
        stacks = self._read_stacks()
        summary = f"was still running after {elapsed_s:.1f} s; its stacks and the end of its output:"
        return RankFailure(rank=rank, kind="hung", summary=summary, text=f"{stacks}\n{self._log_tail()}")

    def stop(self, wait_s: float = 0.0) -> None:
        """End the process and what it started, at the latest after ``wait_s``."""
        self._process.join(timeout=wait_s)
        if self.returncode() is None:
            with contextlib.suppress(ProcessLookupError):  # the worker leads a session of its own, once it has begun
                os.killpg(self.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self._process.close()
        self._conn.close()

    def _read_stacks(self) -> str:
        """Return the dump once it has stopped growing, waiting up to two seconds for it."""
        text, deadline_s = "", time.monotonic() + 2.0
        while time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            grown = self._stacks.read_text() if self._stacks.exists() else ""
            if grown and grown == text:
                break
            text = grown
        return text or "(no stacks: the process did not react to the signal)"

    def _log_tail(self) -> str:
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace") or "(no output)"


def _ready(workers: Sequence[_Worker], ranks: Sequence[int]) -> list[int]:
    """Wait up to POLL_S and return those of ``ranks`` that have answered or died."""
    ready = connection.wait([workers[rank].connection for rank in ranks], timeout=POLL_S)
    return [rank for rank in ranks if workers[rank].connection in ready or workers[rank].returncode() is not None]


def _store_server() -> TCPStore:
    """Return the server of a new rendezvous store, on a port that was free; it ends when it is dropped."""
    from torch.distributed import TCPStore

    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def _note_job(target: str, world_size: int, kwargs: Mapping[str, Any], clock_s: float) -> None:
    """Keep how long a job of a pool took, with all that it was given: who asks for the same again shows there."""
    if path := os.environ.get(TIMES):
        given = " ".join(map(str, (target, world_size, *kwargs.items())))
        with Path(f"{path}.jobs").open("a") as stream:
            stream.write(json.dumps({"job": given, "clock_s": clock_s}) + "\n")


def _test_name() -> dict[str, str]:
    """Return the variable in which pytest names the test at hand, for whoever asks a worker what it runs."""
    name = "PYTEST_CURRENT_TEST"
    return {name: os.environ[name]} if name in os.environ else {}


def _launch_env(port: int, world_size: int, node_sizes: Sequence[int] | None) -> list[dict[str, str]]:
    """Return the variables that a launcher sets, rank by rank.

    >>> [env["LOCAL_RANK"] + "@" + env["GROUP_RANK"] for env in _launch_env(1, 3, [1, 2])]
    ['0@0', '0@1', '1@1']
    """
    sizes = list(node_sizes or [world_size])
    assert sum(sizes) == world_size, (sizes, world_size)
    places = [(node, local_rank, size) for node, size in enumerate(sizes) for local_rank in range(size)]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(device_of(local_rank)),
            "LOCAL_WORLD_SIZE": str(local_world_size),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(sizes)),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's env:// makes every rank a client of our server
        }
        for rank, (node, local_rank, local_world_size) in enumerate(places)
    ]
