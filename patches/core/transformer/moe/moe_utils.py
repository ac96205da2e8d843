"""`all-to-all-sizes`, CPU only: sizes of the pieces that a dispatcher sends are numbers, not a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment


@replaces(
    "megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
    id="all-to-all-sizes",
    when=Moment.CPU,
    why="it turns tensors of a device into arrays and leaves those of the CPU as they are, which torch's "
    "all_to_all_single does not take as sizes",
    remove_when="it gives arrays for tensors on the CPU too",
    aliases=("megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",),
)
def _move(original: Callable[..., Any], tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
    """Run `maybe_move_tensor_to_cpu`; a tensor that is there already becomes an array, too."""
    moved = original(tensor, as_numpy, *args, **kwargs)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) and not moved.is_cuda else moved
