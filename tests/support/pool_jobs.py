"""Small jobs for the pool's own tests."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.pool import TIMEOUT_S, init_gloo


def rank_and_pid(scale: int = 1) -> tuple[int, int]:
    return int(os.environ["RANK"]) * scale, os.getpid()


def run_code(code: str) -> None:
    """Run code as a script would, in a module ``__main__`` of its own; the job fails if it raises."""
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<job>", "exec"), vars(script))


def be_python(words: Sequence[str], cwd: str, env: Mapping[str, str]) -> tuple[int, str, str]:
    """Do in a fork what a fresh interpreter does with a command line; return its exit code and what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("out", "error")]
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                atexit._clear()
                for number, path in enumerate(outputs, start=1):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
                os.chdir(cwd)
                os.environ.clear()
                os.environ.update(env)
                code = _exit_code(words)
                threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        out, error = (path.read_bytes().decode() for path in outputs)
        return os.waitstatus_to_exitcode(status), out, error


def _exit_code(words: Sequence[str]) -> int:
    is_module = words[0] == "-m"
    sys.argv = [*words[is_module:]]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(words[0]).resolve().parent))
    try:
        if is_module:
            for name in (words[1], f"{words[1]}.__main__"):  # runpy warns of what is there already
                if not hasattr(sys.modules.get(name), "__path__"):
                    sys.modules.pop(name, None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as leave:
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
            return 1
        return int(leave.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def variables(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


def sum_of_ranks() -> tuple[torch.Tensor, int]:
    total = torch.tensor([float(init_gloo())])
    dist.all_reduce(total)
    return total, os.getpid()


def world_from_env() -> tuple[int, int]:
    """Initialise as Megatron does, from the launcher's variables."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    return dist.get_rank(), dist.get_world_size()


def fail_on(ranks: list[int]) -> None:
    rank = int(os.environ["RANK"])
    if rank in ranks:
        raise ValueError(f"rank {rank} does not like it")


def exit_on(rank: int, code: int) -> None:
    if int(os.environ["RANK"]) == rank:
        print("last words", file=sys.stderr)
        os._exit(code)


def read_store_late() -> list[str]:
    """Use the store on rank 1 when rank 0 has long returned."""
    rank = init_gloo()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if rank == 0:
        store.set("left", "by rank 0")
        return []
    time.sleep(1.0)
    return [store.get("left").decode()]


def wait_for_a_peer_that_never_comes() -> None:
    """Hang in C++ on rank 1 while the others return."""
    if init_gloo() == 1:
        dist.recv(torch.zeros(1), src=0)


def raise_while_others_wait() -> None:
    rank = init_gloo()
    if rank == 0:
        raise RuntimeError("the real reason")
    dist.barrier()


def stay(time_s: float) -> None:
    time.sleep(time_s)


def leave_script() -> None:
    sys.exit(3)


def return_a_lambda() -> object:
    return lambda: None
