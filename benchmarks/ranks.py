"""Forked ranks that measure together: one start time for all, the last finisher counts."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.links import INTERFACE, Links

Result = TypeVar("Result")
TIMEOUT_S = 60.0
# Between agreeing on a start time and that time: every rank has to fall asleep before. Links refill their burst in it.
_LEAD_S = 0.003


class Clock:
    """Times what all ranks do together; shared by forked ranks, and no message of it crosses the measured network."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("fork")
        self._start_s = context.RawValue("d")
        self._ends_s = context.RawArray("d", num_ranks)
        self._ready = context.Barrier(num_ranks, action=self._choose_start, timeout=TIMEOUT_S)
        self._finished = context.Barrier(num_ranks, timeout=TIMEOUT_S)

    def _choose_start(self) -> None:
        self._start_s.value = time.monotonic() + _LEAD_S

    def time(self, rank: int, act: Callable[[], object]) -> float:
        """Run `act` on every rank from one start time; return the seconds until the last has finished. Collective."""
        self._ready.wait()
        time.sleep(max(0.0, self._start_s.value - time.monotonic()))
        act()
        self._ends_s[rank] = time.monotonic()
        self._finished.wait()
        return max(self._ends_s) - self._start_s.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Two stages of one replica, and the calling rank's place in them.

    Attributes:
        sizes: Number of ranks of the upstream and of the downstream stage.
        rank: The calling rank.
        clock: the clock of all ranks.
        own_group: process group for collectives inside the calling rank's stage.
    """

    sizes: tuple[int, int]
    rank: int
    clock: Clock
    own_group: dist.ProcessGroup

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """Ranks of the upstream stage."""
        return tuple(range(self.sizes[0]))

    @property
    def dst_ranks(self) -> tuple[int, ...]:
        """Ranks of the downstream stage."""
        return tuple(range(self.sizes[0], sum(self.sizes)))

    @property
    def is_src(self) -> bool:
        """Whether the calling rank is upstream."""
        return self.rank < self.sizes[0]

    def time(self, act: Callable[[], object]) -> float:
        """Time one action of all ranks, see :meth:`Clock.time`."""
        return self.clock.time(self.rank, act)


def run_ranks(sizes: tuple[int, int], mbit: float | None, job: Callable[[Stages], Result]) -> Result:
    """Fork the ranks of two stages, run `job` on each, and return rank 0's result.

    Args:
        sizes: Number of ranks of either stage.
        mbit: Rate of every rank's link toward the other stage; None for loopback without a limit.
        job: Runs with one thread, in a gloo world of all ranks.

    Raises:
        LinksUnavailableError: This machine cannot make the links.
        RuntimeError: A rank failed; its own message is on the standard error.
    """
    context = multiprocessing.get_context("fork")
    clock = Clock(sum(sizes))
    with ExitStack() as stack:
        links = stack.enter_context(Links(sizes, mbit)) if mbit is not None else None
        address = f"tcp://{links.address(0)}:29500" if links is not None else f"tcp://127.0.0.1:{free_port()}"
        reader, writer = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=_rank_main, args=(rank, sizes, address, links, clock, job, writer), daemon=True)
            for rank in range(sum(sizes))
        ]
        for process in ranks:
            process.start()
        try:
            return _result(reader, ranks)
        finally:
            deadline_s = time.monotonic() + 5
            for process in ranks:
                process.join(max(0.0, deadline_s - time.monotonic()))
                process.kill()
                process.join()


def _result(reader: Connection, ranks: list[Any]) -> Any:
    """Wait for rank 0's result, or for the first rank that fails."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while True:
        ready = wait([reader, *running])
        if reader in ready:
            return reader.recv()
        for sentinel in ready:
            rank = running.pop(sentinel)
            ranks[rank].join()  # the exit code comes a moment after the sentinel
            if ranks[rank].exitcode:
                raise RuntimeError(f"rank {rank} failed")


def _rank_main(
    rank: int,
    sizes: tuple[int, int],
    address: str,
    links: Links | None,
    clock: Clock,
    job: Callable[[Stages], object],
    writer: Connection,
) -> None:
    if links is not None:
        links.enter(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if links is None else INTERFACE
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=sum(sizes), timeout=timeout)
    # Every rank takes part in making both groups, in the same order; it is a member of one.
    made = [dist.new_group(list(ranks)) for ranks in (range(sizes[0]), range(sizes[0], sum(sizes)))]
    (own_group,) = (group for group in made if isinstance(group, dist.ProcessGroup))
    result = job(Stages(sizes=sizes, rank=rank, clock=clock, own_group=own_group))
    if rank == 0:
        writer.send(result)
    dist.barrier()
    dist.destroy_process_group()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
