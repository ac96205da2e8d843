"""Process groups of one process whose peers do not exist: each is taken to hold what this process holds."""

# Names of parameters differ between versions of torch, and from its stubs; it passes them by position.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

_BACKEND = "vtp_alone"


@contextmanager
def alone_in_world(size: int, device_type: str) -> Iterator[None]:
    """Let this process be rank 0 of a world without the other ranks.

    Megatron's ``--fake-process-group`` (0.16 on) and torch's "fake" backend leave what peers would send as it was
    allocated; then sizes that ranks tell each other, as those of experts' inputs, mean nothing. Here all say the same.

    Args:
        size: number of ranks of the world.
        device_type: device type of the tensors.
    """
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, _make, devices=[*{"cpu", device_type}])
    dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _make(_store: dist.Store, rank: int, size: int, _timeout: object) -> AloneGroup:
    return AloneGroup(rank, size)


class AloneGroup(dist.ProcessGroup):
    """A group whose collectives take no time but that of the copies they end with.

    Sums leave a tensor as it is, so that numbers keep their size. Messages to a single peer are refused by torch.

    Args:
        rank: rank of this process.
        size: number of ranks of the group.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue]
        self._own = rank
        self._number = size

    def size(self) -> int:
        """Return how many ranks there would be."""
        return self._number

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return _BACKEND

    def _leave(self, tensors: list[torch.Tensor], *_options: Any) -> dist.Work:
        """Take the sum of what all hold for what this process holds."""
        return _done(tensors)

    allreduce = allreduce_coalesced = reduce = broadcast = _leave

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for nobody; torch names the options."""
        return _done(None)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], *_options: Any) -> dist.Work:
        """Give what this process holds once for each rank."""
        for each, own in zip(outputs, inputs, strict=True):
            for output in each:
                output.detach().copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: torch.Tensor, own: torch.Tensor, *_options: Any) -> dist.Work:
        """Give what this process holds once for each rank, in one tensor."""
        output.detach().view(self._number, -1).copy_(own.reshape(1, -1))
        return _done(output)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *_options: Any
    ) -> dist.Work:
        """Gather several tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return _done(list(outputs))

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], *_options: Any
    ) -> dist.Work:
        """Give this process its part."""
        for output, parts in zip(outputs, inputs, strict=True):
            output.detach().copy_(parts[self._own])
        return _done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, own: torch.Tensor, *_options: Any) -> dist.Work:
        """Give this process its part of one tensor."""
        output.detach().view(-1).copy_(own.reshape(self._number, -1)[self._own])
        return _done(output)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *_options: Any
    ) -> dist.Work:
        """Scatter several tensors."""
        for output, own in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, own)
        return _done(list(outputs))

    def all_to_all_single(self, output: torch.Tensor, own: torch.Tensor, *_sizes: Any) -> dist.Work:
        """Give as many rows as are wanted, of those that this process holds, over and over."""
        if len(own):
            rows = torch.arange(len(output), device=own.device) % len(own)
            torch.index_select(own, 0, rows, out=output.detach())
        return _done(output)

    # Names of torch before 2.14.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _done(result: Any) -> dist.Work:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)
