"""Stands for the bindings of HCCL."""

from __future__ import annotations

from typing import Any


class ProcessGroupHCCL:
    """Stands for HCCL's process group; there is none to be made."""

    class Options:
        """What a process group is made with.

        As in torch_npu 2.7.1 it has no attribute ``hccl_config`` before one is assigned.
        """

        hccl_config: dict[str, Any]

        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
