"""Small jobs for the pool's own tests."""

from __future__ import annotations

import os
import sys
import time
import types
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.support.pool import TIMEOUT_S, init_gloo


def rank_and_pid(scale: int = 1) -> tuple[int, int]:
    return int(os.environ["RANK"]) * scale, os.getpid()


def run_code(code: str) -> None:
    """Run code as a script would, in a module ``__main__`` of its own; the job fails if it raises."""
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<job>", "exec"), vars(script))


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
