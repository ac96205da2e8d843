"""What the forward pass of one microbatch keeps for its backward pass, counted on the storages themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import router


class Held:
    """Counts, while it is entered, the bytes of the storages that autograd saves, each once, and no weights."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self._kept: dict[int, torch.Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> Held:
        self._hooks.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        self._hooks.__exit__(*failure)

    @property
    def num_bytes(self) -> int:
        """Of all that was saved so far."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._kept.setdefault(storage.data_ptr(), tensor)
        return tensor


def note_activations(facts: dict[str, Any]) -> None:
    """Count what every chunk's first microbatch saves."""
    original = DistributedDataParallel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        known = facts.setdefault("activations", [])
        if getattr(self, "_was_counted", False):
            return original(self, *args, **kwargs)
        self._was_counted = True
        with Held(self.parameters()) as held:
            output = original(self, *args, **kwargs)
        known.append(held.num_bytes)
        return output

    DistributedDataParallel.forward = forward


class LatentAttention(DotProductAttention):
    """Megatron's local core attention, for heads whose values have a width of their own.

    Latent attention builds it twice: the first time, as a part of its base class, without the widths.
    """

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def balance_routers(facts: dict[str, Any]) -> None:
    """Let every expert get as many tokens as any other, as ``plan`` assumes: token after token, expert after expert."""
    original = router.TopKRouter.routing

    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_experts = logits.shape[-1]
        tokens = torch.arange(logits[..., 0].numel()).view(*logits.shape[:-1], 1)
        turn = (torch.arange(num_experts) - tokens * self.topk) % num_experts
        return original(self, logits - 1e3 * (turn >= self.topk), *args, **kwargs)

    router.TopKRouter.routing = routing
