"""ms-swift's adapters (LoRA): their start does not depend on how the model is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.swift import known_swift
from vtp_plugin.runtime.step.adapter_start import first_factor


@replaces(known_swift.ADAPTERS, id="swift-adapters", when=Moment.SWIFT)
def _prepare(original: Callable[[Any, Any], Any], args: Any, model: Any) -> Any:
    """Run `prepare_adapter`, then draw the first factors whole, by their names, and keep this rank's parts.

    Why: each rank draws its part of a first factor, as wide as the stage makes it.

    Remove when: mcore-bridge draws adapters whole.
    """
    if next(model.parameters(), None) is None:  # the second chunk of a U's cloud; PEFT takes no model without targets
        return model
    made = original(args, model)
    with torch.no_grad():
        for part in nested_values(model.sharded_state_dict()):
            if isinstance(part, ShardedTensor) and ".lora_A." in part.key and part.data is not None:
                part.data.copy_(_draw(part, args.seed))
    return made


def _draw(part: ShardedTensor, seed: int) -> torch.Tensor:
    """Draw a factor, as `LoraParallelLinear.reset_lora_parameters` of mcore-bridge 1.6.5; cut this rank's part.

    Returns:
        A part of `[rank, inputs]`, as large as the tensor of `part`.
    """
    num_outer = part.prepend_axis_num  # where Megatron stores layers as one tensor, the layer's number
    name = f"{part.key.replace('.ref_adapter.', '.default.')} {part.global_offset[:num_outer]}"
    whole = first_factor(name, part.global_shape[num_outer:], seed=seed)
    offsets = part.global_offset[num_outer:]
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.local_shape, strict=True))]
