"""Memory of received tensors on the host."""

from __future__ import annotations

import torch

from vtp_plugin.platform.interface import Platform

Shape = tuple[int, ...]


class HostMemory:
    """Allocates tensors, and reuses their memory once no living tensor shares it.

    On the host only. Its allocator returns large blocks to the system, and touching fresh pages costs about as much as
    receiving into them. Devices have torch's caching allocator, which also knows about tensors on other streams.

    Args:
        platform: where the tensors are.

    Attributes:
        num_allocations: how often fresh memory was needed; constant in the steady state of a run with fixed shapes.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.num_allocations = 0
        self._blocks: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in memory that no living tensor uses."""
        if not self._platform.host_blocking_wait:
            return torch.empty(shape, dtype=dtype, device=self._platform.device())
        for block, storage in self._blocks:
            if block.shape == shape and block.dtype is dtype and _is_free(storage):
                return block.detach()
        # Free memory of other shapes is released: with varying lengths it would pile up.
        self._blocks = [one for one in self._blocks if not _is_free(one[1])]
        block = torch.empty(shape, dtype=dtype)
        self._blocks.append((block, block.untyped_storage()))
        self.num_allocations += 1
        return block.detach()


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Tell whether nobody but this list uses a storage: it holds two references, a tensor's and the storage's."""
    return torch._C._storage_Use_Count(storage._cdata) == 2
