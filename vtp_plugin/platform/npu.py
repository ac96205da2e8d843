"""The NPU platform: Ascend devices through torch_npu, HCCL."""

from __future__ import annotations

import sys
from typing import Final

from vtp_plugin.platform.interface import BackendName, Platform, PlatformName

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
