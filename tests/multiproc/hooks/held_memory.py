"""What a rank holds of a model and its optimizer, counted on the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


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
