"""The CUDA platform: NVIDIA devices, NCCL."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed

from vtp_plugin.platform.base import BackendName, PlatformName


class CudaPlatform:
    """Training on NVIDIA devices; see :class:`vtp_plugin.platform.base.Platform`."""

    name: PlatformName = "cuda"
    backend: BackendName = "nccl"
    host_blocking_wait = False
    gathers_by_messages = False
    is_installed = False

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def device(self) -> torch.device:
        """Return the current CUDA device."""
        return torch.device("cuda", torch.cuda.current_device())

    def module(self) -> ModuleType:
        """Return ``torch.cuda``."""
        return torch.cuda

    def group_options(self, buffer_size_bytes: int | None = None) -> object | None:
        """Return NCCL options with a high-priority stream, or None if this torch has no NCCL.

        A stage waits for the boundary, so its kernels go before the compute kernels that are queued already. NCCL sizes
        its own buffers: ``buffer_size_bytes`` is not used.
        """
        options_class = getattr(getattr(torch.distributed, "ProcessGroupNCCL", None), "Options", None)
        if options_class is None:
            return None
        options = options_class()
        if hasattr(options, "is_high_priority_stream"):
            options.is_high_priority_stream = True
        return options

    def install(self) -> None:
        """Do nothing: Megatron runs on CUDA as it is."""

    def uninstall(self) -> None:
        """Do nothing."""
