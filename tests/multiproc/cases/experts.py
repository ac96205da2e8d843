"""Mixtures of experts as models of today have them, as small as their structure allows."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import router
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.multiproc.cases.core_cases import Case
from tests.multiproc.hooks.gathered_attention import GatheredAttention, chunk_positions
from tests.multiproc.hooks.grouped_products import stand_in_for_grouped_gemm

NUM_EXPERTS = 6
_COMMON = {
    "num_moe_experts": NUM_EXPERTS,
    "moe_ffn_hidden_size": 36,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
_BALANCED = {**_COMMON, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
EXPERTS: dict[str, dict[str, Any]] = {
    "plain": _COMMON,
    # Their products are one, and their weights none of Megatron's linear layers.
    "grouped": {**_COMMON, "moe_grouped_gemm": True},
    "balanced": _BALANCED,
    "gathered": {**_BALANCED, "moe_token_dispatcher_type": "allgather", "moe_z_loss_coeff": 0.01},
    "by sequence": {**_BALANCED, "moe_router_load_balancing_type": "seq_aux_loss"},
    "by batch": {**_BALANCED, "moe_router_load_balancing_type": "global_aux_loss"},
    "shared": {**_BALANCED, "moe_shared_expert_intermediate_size": 24},
    # As DeepSeek V3: sigmoid scores, a bias that balances, groups of experts.
    "biased": {
        **_COMMON,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
    },
    # Without a loss; every step gives the experts of a layer equal shares of the tokens.
    "sinkhorn": {**_COMMON, "moe_router_load_balancing_type": "sinkhorn"},
    "sinkhorn of one": {**_COMMON, "moe_router_load_balancing_type": "sinkhorn", "moe_router_topk": 1},
    "every second": {**_BALANCED, "moe_layer_freq": 2},
    # Of four layers.
    "the first two": {**_BALANCED, "moe_layer_freq": [1, 1, 0, 0]},
    "the last two": {**_BALANCED, "moe_layer_freq": [0, 0, 1, 1]},
    # Every expert can take all tokens: Megatron 0.12 ends where it could take more.
    "capacity": {**_BALANCED, "moe_expert_capacity_factor": 3.0},
    # Here tokens are dropped.
    "dropping": {**_BALANCED, "moe_expert_capacity_factor": 1.0},
    "dropping the last": {
        **{**_BALANCED, "moe_expert_capacity_factor": 0.75, "moe_token_drop_policy": "position"},
        "moe_token_dispatcher_type": "allgather",
    },
    "dropping and padding": {
        **{**_BALANCED, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    },
}

_HAS_CHUNKS = "vp_stage" in inspect.signature(get_gpt_decoder_block_spec).parameters


def config_of(case: Case) -> dict[str, Any]:
    """Give the fields of the configuration for a case's experts."""
    if not case.model.experts:
        return {}
    return {
        **EXPERTS[case.model.experts],
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
    }


def block_spec(config: TransformerConfig, vp_stage: int | None, *, is_gathered: bool) -> Any:
    """Give the layers of a chunk, with experts where the configuration has them."""
    if config.moe_grouped_gemm:
        stand_in_for_grouped_gemm()
    chunk = {"vp_stage": vp_stage} if _HAS_CHUNKS else {}
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False, **chunk)
    for layer in spec.layer_specs if is_gathered else ():
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


@contextmanager
def drops_by_shard(case: Case) -> Iterator[None]:
    """Let a rank of a reference drop tokens as the ranks of a stage would: each decides among its own ones.

    Rows are positions, each with all samples of the microbatch. A context-parallel rank has a chunk from the front and
    one from the back; of these rows, a tensor-parallel rank has a part that hangs together.
    """
    if not case.model.shards:
        yield
        return
    # Up to Megatron 0.12 the scores of the experts and the drops are one function.
    name = next(name for name in ("apply_router_token_dropping", "topk_softmax_with_capacity") if hasattr(router, name))
    original = getattr(router, name)

    def apply(*values: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        """Drop among the rows of each rank; what has one row for each token is put together, and counts are summed."""
        tp, cp = case.model.shards[parallel_state.get_pipeline_model_parallel_rank()]
        tokens = torch.arange(len(values[0])).view(case.data.seq, -1)
        own = [rows for rank in range(cp) for rows in tokens[chunk_positions(case.data.seq, rank, cp)].chunk(tp)]
        own = [rows.flatten() for rows in own]
        parts = [
            original(*(value[rows] if torch.is_tensor(value) else value for value in values), **options) for rows in own
        ]
        order = torch.cat(own).argsort()
        return tuple(
            torch.cat(pieces)[order] if pieces[0].dim() == 2 else torch.stack(pieces).sum(dim=0)
            for pieces in zip(*parts, strict=True)
        )

    setattr(router, name, apply)
    try:
        yield
    finally:
        setattr(router, name, original)


def forget(model: Iterable[Any]) -> None:
    """Forget what Megatron keeps of routers after a run.

    Numbers for the log: their lists have one entry for each layer, and the process keeps them. Tensors of the last
    step: a dispatcher keeps them with the way back to the weights, so that model and process groups would stay, too.
    """
    for chunk in model:
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher"):
                vars(module.token_dispatcher).clear()
    logging: Any = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        logging.destroy_moe_metrics_tracker()
    for module in (parallel_state, sys.modules.get("megatron.core.transformer.moe.moe_utils")):
        find = getattr(module, "get_moe_layer_wise_logging_tracker", None)  # up to 0.17
        if find is not None:
            find().clear()
