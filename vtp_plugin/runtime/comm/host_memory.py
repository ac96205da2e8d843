"""Memory of received tensors on the host."""

from __future__ import annotations

import math

import torch

Shape = tuple[int, ...]


class HostMemory:
    """Allocates tensors, and reuses their memory once no living tensor shares it.

    For the host only. Its allocator returns large blocks to the system, and touching fresh pages costs about as much as
    receiving into them. Devices have torch's caching allocator, which also knows about tensors on other streams.

    Attributes:
        num_allocations: how often fresh memory was needed; constant in the steady state of a run with fixed shapes.
    """

    def __init__(self) -> None:
        """Start without any memory."""
        self.num_allocations = 0
        self._storages: list[torch.UntypedStorage] = []

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in memory that no living tensor uses."""
        num_bytes = math.prod(shape) * dtype.itemsize
        for storage in self._storages:
            if storage.nbytes() == num_bytes and _is_free(storage):
                return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # pyright: ignore[reportCallIssue]
        # Free memory of other sizes is released: with varying lengths it would pile up.
        self._storages = [storage for storage in self._storages if not _is_free(storage)]
        tensor = torch.empty(shape, dtype=dtype)
        self._storages.append(tensor.untyped_storage())
        self.num_allocations += 1
        return tensor


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Tell whether no tensor uses this storage: the argument then holds the only reference."""
    return torch._C._storage_Use_Count(storage._cdata) == 1
