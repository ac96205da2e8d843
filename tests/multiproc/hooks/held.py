"""What a rank holds of a model, its optimizer and its microbatches, counted on the tensors and storages themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe import router

from tests.multiproc.hooks.in_place import Facts, after, around
from vtp_plugin.api import _Holder
from vtp_plugin.runtime.step.executor import Executor
from vtp_plugin.runtime.step.weight_gradients import WeightGradients


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


def note_activations(facts: Facts) -> None:
    """Count what every chunk's first microbatch saves."""

    @around(DistributedDataParallel, "forward")
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        known = facts.setdefault("activations", [])
        if getattr(self, "_was_counted", False):
            return original(self, *args, **kwargs)
        self._was_counted = True
        with Held(self.parameters()) as held:
            output = original(self, *args, **kwargs)
        known.append(held.num_bytes)
        return output


class LatentAttention(DotProductAttention):
    """Megatron's local core attention, for heads whose values have a width of their own.

    Latent attention builds it twice: the first time, as a part of its base class, without the widths.
    """

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def balanced_routers(facts: Facts) -> None:
    """Let every expert get as many tokens as any other, as ``plan`` assumes: token after token, expert after expert."""

    @around(router.TopKRouter, "routing")
    def routing(original: Any, self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        num_experts = logits.shape[-1]
        tokens = torch.arange(logits[..., 0].numel()).view(*logits.shape[:-1], 1)
        turn = (torch.arange(num_experts) - tokens * self.topk) % num_experts
        return original(self, logits - 1e3 * (turn >= self.topk), *args, **kwargs)


def held_memory(model: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """Count weights, gradient buffers and optimizer state.

    Args:
        model: chunks, each in Megatron's DistributedDataParallel.
        optimizer: after a step, so that it has its state.

    Returns:
        Numbers, by their keys in ``plan --json``.
    """
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    buffers = [buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in parameters}
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "weight_bytes": sum(weights.values()),
        "gradient_bytes": sum(buffer.grad_data.nbytes for buffer in buffers),
        "optimizer_bytes": sum(_optimizer_bytes(part) for part in _parts(optimizer)),
    }


def _parts(optimizer: Any) -> Iterator[Any]:
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from _parts(part)
    elif optimizer.optimizer is not None:
        yield optimizer


def _optimizer_bytes(part: Any) -> int:
    """Count moments and main parameters; the number of steps, one for each parameter, is left out."""
    moments = [
        value
        for state in part.optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and name != "step"
    ]
    names = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")
    mains = [tensor for name in names for group in getattr(part, name, []) for tensor in group]
    return sum(tensor.nbytes for tensor in (*moments, *mains))


def note_waiting(facts: Facts) -> None:
    """Note after every compute which activations are kept, which microbatches wait, and the bytes of these.

    A microbatch is named by its virtual stage alone, and there is a list of each.
    """
    facts["kept"] = []

    def note(_none: None, self: Any, action: Any) -> None:
        assert _Holder.session is not None
        waiting = _Holder.session.running.require_schedule_runner().weight_gradients
        kept = (sorted(vstage for vstage, _ in held) for held in (self._kept, waiting._waiting))
        facts["kept"].append((*kept, waiting.num_bytes))

    for name in ("_forward", "_backward", "_weights"):
        after(Executor, name)(note)


def keep_one_more(facts: Facts) -> None:
    """Let every microbatch that waits keep the input of one layer in two copies."""
    original = WeightGradients.backward

    @contextmanager
    def backward(
        self: WeightGradients, vstage: int, microbatch: int, whole: Collection[torch.Tensor]
    ) -> Iterator[None]:
        with original(self, vstage, microbatch, whole):
            yield
        uses = self._waiting[vstage, microbatch]
        inputs, gradient = uses[0].tensors
        uses.append(replace(uses[0], tensors=(inputs.clone(), gradient), versions=(0, uses[0].versions[1])))

    WeightGradients.backward = backward
