"""The CUDA platform: NVIDIA devices, NCCL."""

from __future__ import annotations

import torch.distributed

from vtp_plugin.platform.interface import BackendName, Platform, PlatformName


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
