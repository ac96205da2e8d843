"""What the forward pass of one microbatch keeps for its backward pass, counted on the storages themselves."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel


def note_activations(facts: dict[str, Any]) -> None:
    """Count, for every chunk's first microbatch, the bytes of the storages that are saved and no weights."""
    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = facts.setdefault("activations", [])
        if getattr(self, "_was_counted", False):
            return original(self, *args, **kwargs)
        self._was_counted = True
        weights = {weight.untyped_storage().data_ptr() for weight in self.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                kept.setdefault(storage.data_ptr(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = original(self, *args, **kwargs)
        known.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        return output

    DistributedDataParallel.forward = forward
