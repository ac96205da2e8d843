"""One worker process of tests.support.pool: takes messages from the parent, one by one, until it is told to exit."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.group_queries.recorder import refusing_unknown_callers

PARENT_POLL_S = 0.5


def serve(conn: Connection[Any, Any], log: str, stacks: str) -> None:
    """Serve the other end of a connection in a process that was just forked.

    Args:
        conn: brings messages and takes answers.
        log: file for standard output and error.
        stacks: file for the stacks of all threads, written on SIGUSR1.
    """
    os.setsid()
    _die_with(os.getppid())
    _write_to(log)
    faulthandler.enable()
    with open(stacks, "w") as stream, conn:
        faulthandler.register(signal.SIGUSR1, file=stream, all_threads=True)
        importlib.import_module("tests.support.pool_preload")  # sets the environment, where the fork server could not
        import torch

        torch.set_num_threads(1)
        _answer(conn)


def _write_to(log: str) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(fd, stream.fileno())
        stream.reconfigure(write_through=True)
    os.close(fd)


class _Job:
    """The job at hand: its function, and the environment to put back after it."""

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        self._function: Callable[..., object] | None = None

    def load(self, target: str, env: dict[str, str]) -> None:
        os.environ.update(env)
        module, _, function = target.partition(":")
        is_new = module not in sys.modules
        self._function = getattr(importlib.import_module(module), function)
        if is_new:
            gc.freeze()  # no collection looks at what an import made

    def run(self, kwargs: dict[str, Any]) -> object:
        assert self._function is not None
        with refusing_unknown_callers():
            return self._function(**kwargs)

    def clean_up(self) -> None:
        import torch.distributed as dist

        self._function = None
        if dist.is_initialized():
            dist.destroy_process_group()
        # Megatron's destroy_model_parallel() forgets some groups. A script in a fork of this process would drop them,
        # and wait for ever for their threads, which a fork does not have.
        if (state := sys.modules.get("megatron.core.parallel_state")) is not None:
            groups = [name for name, value in vars(state).items() if isinstance(value, dist.ProcessGroup)]
            vars(state).update(dict.fromkeys(groups))
        os.environ.clear()
        os.environ.update(self._environ)
        gc.collect()  # a store or a group in a reference cycle would keep its sockets into the next job


def _answer(conn: Connection[Any, Any]) -> None:
    job = _Job()
    while True:
        try:
            name, *arguments = pickle.loads(conn.recv_bytes())
        except EOFError:
            return
        if name == "exit":
            return
        try:
            answer = pickle.dumps(("ok", getattr(job, name)(*arguments)))
        except BaseException as error:  # SystemExit too: a script's sys.exit() must not end the worker unseen
            summary = f"raised {type(error).__name__}"
            answer = pickle.dumps(("raised", summary, traceback.format_exc()))
        conn.send_bytes(answer)


def _die_with(parent_pid: int) -> None:
    """Watch the parent, and end this process with all its children when the parent is gone.

    The kernel's parent-death signal would end this process only: a checkpoint save leaves helpers of 450 MB behind,
    which watch nobody.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        os.killpg(0, signal.SIGKILL)  # this worker leads a session of its own

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
