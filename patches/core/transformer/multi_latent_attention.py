"""`latent-attention-grad`: the gradients of latent attention do not depend on the size of the stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.versions import capability
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_MODULE = "megatron.core.transformer.multi_latent_attention"


_LATENT: Final[Mapping[str, Any]] = {
    "when": Moment.STAGES,
    "unneeded": {"<0.19": "it has no such method; `latent-attention-refused` ends a run with latent attention"},
}


@replaces(f"{_MODULE}:MLASelfAttention._qkv_down_projection", id="latent-attention-grad", **_LATENT)
@replaces(f"{_MODULE}:FusedMLASelfAttention._qkv_down_projection", id="latent-attention-grad/fused", **_LATENT)
def _project(
    session: Session,
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    layer: Any,
    hidden_states: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `_qkv_down_projection`; keys are returned whole, and their positional part adds up its gradients.

    Why: the positional part of the keys is one for all heads; in the backward pass each rank keeps what came from its
    own heads, and nobody adds the others, so stages of several ranks would train with other gradients than stages of
    one.

    Remove when: Megatron sums the gradient of `k_pos_emb` over the tensor-parallel ranks.

    With a uniform list it runs unchanged.

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
    if group.size() == 1 or not session.pipelines.are_unequal(layer.pg_collection):
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


_NORM: Final[Mapping[str, Any]] = {
    "when": Moment.STAGES,
    "unneeded": {"<0.19": "`latent-attention-refused` ends a run with latent attention"},
}


@replaces(f"{_MODULE}:MLASelfAttention.__init__", id="latent-attention-norm", **_NORM)
@replaces(f"{_MODULE}:FusedMLASelfAttention.__init__", id="latent-attention-norm/fused", **_NORM)
def _init(session: Session, original: Callable[..., None], layer: Any, config: Any, *args: Any, **kwargs: Any) -> None:
    """Run `__init__`; on unequal stages each rank then gives its share of what Megatron will add up.

    Why: `finalize_model_grads` adds up over the ranks of a stage what is called `q_layernorm`, which in other attention
    sees heads of its rank only; here, without sequence parallelism, each rank has the whole of it.

    Remove when: Megatron knows the norms to be summed by a mark, not by their names.
    """
    original(layer, config, *args, **kwargs)
    size = layer.tp_group.size()
    is_summed_whole = config.qk_layernorm and not config.sequence_parallel and hasattr(layer, "q_layernorm")
    if size > 1 and is_summed_whole and session.pipelines.are_unequal(layer.pg_collection):
        for parameter in layer.q_layernorm.parameters():
            parameter.register_hook(lambda gradient: gradient / size)


@replaces(
    f"{_MODULE}:MultiLatentAttention.__init__",
    id="latent-attention-refused",
    when=Moment.STAGES,
    unneeded=dict.fromkeys(
        capability("latent_attention").versions, "`latent-attention-grad` and `latent-attention-grad/fused` correct it"
    ),
)
def _refuse(
    session: Session, host: MegatronHost, original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any
) -> None:
    """Refuse to build latent attention for stages of different sizes.

    Why: its gradient depends on the size of the stage, and is corrected for Megatron 0.19 only.

    Remove when: latent attention was run with this Megatron.

    Raises:
        ConfigError: the stages differ.
    """
    if not session.pipelines.are_unequal():
        original(layer, *args, **kwargs)
        return
    raise ConfigError(
        f"multi_latent_attention with Megatron {host.name}; on stages of different sizes it was run with Megatron 0.19 "
        "only; use that, or give every stage the same sizes"
    )
