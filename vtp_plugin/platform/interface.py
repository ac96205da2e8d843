"""What a run needs of its device: GPUs, NPUs, and what one process can do alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final, Literal

import torch
import torch.distributed
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

PlatformName = Literal["cpu", "cuda", "npu"]
BackendName = Literal["gloo", "nccl", "hccl"]


class Platform:
    """The device that this process trains on and the backend that its tensors travel on.

    A process has one, made by :func:`vtp_plugin.platform.detect.detect`. It has no process groups.

    Attributes:
        name: the device type, as in ``torch.device(name)``.
        backend: the process-group backend for tensors of this device.
        reason: why this platform was chosen, as a phrase for the log.
        host_blocking_wait: whether ``Work.wait()`` blocks the host until the data is there (gloo), or only orders
            streams.
        gathers_by_messages: whether the ranks of a stage swap slices by messages, not by the backend's all-gather.
            Gloo's all-gather takes up to five times as long as messages (``benchmarks/finish.py``).
        orders_by_peer: whether a message waits only for earlier ones of its group from the same sender to the same
            receiver (gloo). Elsewhere the messages of two ranks, or of a whole group, are one queue for both
            directions.
    """

    name: PlatformName
    backend: BackendName
    host_blocking_wait = False
    gathers_by_messages = False
    orders_by_peer = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    @property
    def is_installed(self) -> bool:
        """Whether :meth:`install` has changed torch and :meth:`uninstall` has not yet restored it."""
        return False

    def device(self) -> torch.device:
        """Return the current device, with its index where the device type has one."""
        return torch.device(self.name, self.module().current_device())

    def module(self) -> ModuleType:
        """Return ``torch.cpu``, ``torch.cuda`` or ``torch.npu``."""
        # Looked up at each call: torch.npu exists only once torch_npu is imported.
        return torch.get_device_module(self.name)

    def card_name(self) -> str:
        """Return what the card is called, for people."""
        return str(self.module().get_device_name())

    def memory_bytes(self) -> int:
        """Return how much memory the device has."""
        return int(self.module().mem_get_info()[1])

    def peak_memory_bytes(self) -> int | None:
        """Return the most memory that tensors of this process had on the device at a time; None if nobody counts it."""
        peak = getattr(self.module(), "max_memory_allocated", None)
        return None if peak is None else int(peak())

    def group_options(self, buffer_size_bytes: int | None = None) -> object | None:
        """Return the ``pg_options`` for the process group of a point-to-point channel, or None for the defaults.

        Args:
            buffer_size_bytes: The largest message of the channel in bytes. Only HCCL sizes a buffer from it.
        """
        return None

    def install(self) -> None:
        """Make Megatron's device calls work on this platform. Only the CPU platform changes anything."""

    def uninstall(self) -> None:
        """Restore what :meth:`install` changed; without a preceding :meth:`install` it does nothing."""


class CudaPlatform(Platform):
    """Training on NVIDIA devices; see :class:`vtp_plugin.platform.interface.Platform`."""

    name: PlatformName = "cuda"
    backend: BackendName = "nccl"

    def group_options(self, buffer_size_bytes: int | None = None) -> object | None:
        """Return NCCL options with a high-priority stream, or None if this torch has no NCCL.

        A stage waits for the boundary, so the kernels of a channel run before compute kernels that are already queued.
        NCCL sizes its buffers itself and ignores ``buffer_size_bytes``.
        """
        options_class = getattr(getattr(torch.distributed, "ProcessGroupNCCL", None), "Options", None)
        if options_class is None:
            return None
        options = options_class()
        if hasattr(options, "is_high_priority_stream"):
            options.is_high_priority_stream = True
        return options


_MIB: Final = 1 << 20


class NpuPlatform(Platform):
    """Training on Ascend devices; see :class:`vtp_plugin.platform.interface.Platform`.

    ``torch_npu`` must be imported. ``transfer_to_npu`` or MindSpeed map what Megatron calls on ``torch.cuda``, not this
    class.
    """

    name: PlatformName = "npu"
    backend: BackendName = "hccl"

    def group_options(self, buffer_size_bytes: int | None = None) -> object | None:
        """Return HCCL options with a buffer for one message, or None for HCCL's default buffer.

        By default each communicator takes twice 200 MB of device memory. A channel carries one message at a time: the
        size of the largest message, rounded up to whole MB, is enough.

        Args:
            buffer_size_bytes: The largest message in bytes; None keeps the default.
        """
        if buffer_size_bytes is None:
            return None
        options_class = _hccl_options_class()
        if options_class is None:
            return None
        options = options_class()
        options.hccl_config = {"hccl_buffer_size": buffer_size_mb(buffer_size_bytes)}
        return options


def buffer_size_mb(buffer_size_bytes: int) -> int:
    """Return the HCCL buffer size in MB that holds a message, at least 1.

    >>> buffer_size_mb(1), buffer_size_mb(1 << 20), buffer_size_mb((1 << 20) + 1)
    (1, 1, 2)
    """
    return max(1, -(-buffer_size_bytes // _MIB))


def _hccl_options_class() -> type | None:
    """Return torch_npu's ``ProcessGroupHCCL.Options``; None where another package provides the hccl backend."""
    bindings = sys.modules.get("torch_npu._C._distributed_c10d")
    return getattr(getattr(bindings, "ProcessGroupHCCL", None), "Options", None)


# Names of parameters differ between versions of torch, and from its stubs; it passes them by position.
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false, reportIncompatibleVariableOverride=false


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
