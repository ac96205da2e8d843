"""H14: the gradient of latent attention does not depend on the size of the stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patching import PatchRecord, wrap_with

_MODULE = "megatron.core.transformer.multi_latent_attention"


def records(host: MegatronHost) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    if not host.can("latent_attention"):
        return (
            PatchRecord(
                id="H14c",
                target=f"{_MODULE}:MultiLatentAttention.__init__",
                build=wrap_with(_refuse, host.name),
                why="its gradient depends on the size of the stage, and was mended in Megatron 0.19 only",
                remove_when="latent attention was run with this Megatron",
            ),
        )
    common = {
        "build": wrap_with(_project),
        "unneeded": {"<0.19": "it has no such method; H14c refuses latent attention"},
        "why": "the positional part of the keys is one for all heads; in the backward pass each rank keeps what came "
        "from its own heads, and nobody adds the others, so stages of several ranks would train with other gradients "
        "than stages of one",
        "remove_when": "Megatron sums the gradient of `k_pos_emb` over the tensor-parallel ranks",
    }
    return (
        PatchRecord(id="H14", target=f"{_MODULE}:MLASelfAttention._qkv_down_projection", **common),
        PatchRecord(id="H14b", target=f"{_MODULE}:FusedMLASelfAttention._qkv_down_projection", **common),
    )


def _project(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]], layer: Any, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_qkv_down_projection`; keys are returned whole, and their positional part adds up its gradients.

    Returns:
        The queries as they were, and the keys `[S, B, kv_lora_rank + qk_pos_emb_head_dim]`, with this rank's part of S
        under sequence parallelism. Of whole keys Megatron gathers the positional part with a backward pass that adds
        up, so it is right then.
    """
    # Not at the top: the older families refuse, and have other functions.
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_tensor_model_parallel_region,
        scatter_to_sequence_parallel_region,
    )

    queries, keys = original(layer, hidden_states)
    config, group = layer.config, layer.tp_group
    sizes = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
    if group.size() == 1:
        return queries, keys
    is_cut = keys.size(-1) != sum(sizes)
    if is_cut:
        keys = gather_from_tensor_model_parallel_region(keys, group=group)
    if not config.sequence_parallel:
        content, positions = torch.split(keys, sizes, dim=-1)
        keys = torch.cat([content, copy_to_tensor_model_parallel_region(positions, group=group)], dim=-1)
    elif is_cut:
        keys = scatter_to_sequence_parallel_region(keys, group=group)
    return queries, keys


def _refuse(name: str, original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Refuse to build latent attention.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"multi_latent_attention with Megatron {name}; on stages of different sizes it was run with Megatron 0.19 "
        "only; use that, or give every stage the same sizes"
    )
