"""`split-backward`: linear layers leave the gradients of their weights for later, where the order says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_NAME = "linear_with_grad_accumulation_and_async_allreduce"


@replaces(
    f"megatron.core.tensor_parallel.layers:{_NAME}",
    id="split-backward",
    when=Moment.SPLIT,
    why="its backward computes the gradients of the input, for which the stage before waits, and of the weight, for "
    "which nobody waits before the step ends, at once",
    remove_when="Megatron's linear layers leave the gradients of weights for later",
    aliases=(f"megatron.core.tensor_parallel:{_NAME}",),
)
def _linear(
    session: Session,
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Run a linear layer; in a forward whose backward is split as if its weight were frozen, but watched.

    A bias is added outside: Megatron's layer of a frozen weight gives it no gradient.
    """
    waiting = session.pipelines.weight_gradients
    if not waiting.is_left_for_later(weight, input):
        return original(input, weight, bias, *args, **kwargs)
    output = layers.linear_with_frozen_weight(input, weight.detach(), None, *args, **kwargs)
    gather = partial(_gathered, kwargs.get("tp_group")) if kwargs.get("sequence_parallel") else _as_it_is
    waiting.watch(output, weight=weight, inputs=input, gather=gather)
    return output if bias is None else output + bias


def _gathered(group: Any, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return gather_from_sequence_parallel_region(inputs, group=group)


def _as_it_is(inputs: torch.Tensor) -> torch.Tensor:
    return inputs


def layers_that_cannot_split(chunks: Sequence[torch.nn.Module]) -> Iterator[str]:
    """Yield one line for a model with layers of Transformer Engine, whose backwards are whole."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        has_weight = any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
        if has_weight and "transformer_engine" in type(module).__module__:
            yield (
                f"--vtp-split-backward with a model of {type(module).__name__}: only Megatron's own linear layers "
                "leave gradients of weights for later; build the model of these, or leave --vtp-split-backward out"
            )
            return
