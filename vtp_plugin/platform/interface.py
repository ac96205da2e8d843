"""The interface of a platform; through it the runtime never names a kind of device."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

PlatformName = Literal["cpu", "cuda", "npu"]
BackendName = Literal["gloo", "nccl", "hccl"]


class Platform:
    """The device that this process trains on and the backend that its tensors travel on.

    A process has one, made by :func:`vtp_plugin.platform.detect`. It has no process groups.

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
