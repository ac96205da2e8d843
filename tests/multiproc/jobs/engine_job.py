"""Imports in Megatron's models of Transformer Engine's layers, which a stand-in computes: ``... FOLDER FOLDER ...``.

Each folder has an import in ``start`` and tokens in ``tokens.npy``; the logits are written beside them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support import engine_stand_in

engine_stand_in.install()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from tests.multiproc.jobs.core_job import cpu_only  # noqa: E402
from vtp_plugin.checkpoint.hf.hf_model import (  # noqa: E402
    CARRIED,
    RELEASE,
    HFModel,
)
from vtp_plugin.checkpoint.hf.read_config import CONFIG, read_config, read_model  # noqa: E402


def main() -> None:
    """Compute all."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu_only(), torch.no_grad():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(7)
        for folder in map(Path, sys.argv[1:]):
            like = folder / "start" / CARRIED
            model = _model(read_model(read_config(like), like / CONFIG))
            metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            wanted: Any = model.sharded_state_dict(metadata=metadata)
            print(folder.name, *sorted({each.key for each in wanted.values()}))
            # Neither of the two leaves a tensor or a state out.
            found = dist_checkpointing.load({"model": wanted}, str(folder / "start" / RELEASE))
            model.load_state_dict(found["model"], strict=True)
            tokens = torch.from_numpy(np.load(folder / "tokens.npy"))
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            np.save(folder / "logits.npy", model.eval()(tokens, positions, None).numpy())


def _model(model: HFModel) -> GPTModel:
    """Make a model as the flags of an import make it, with Transformer Engine's layers."""
    experts: dict[str, Any] = {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.topk,
        "moe_ffn_hidden_size": model.experts.ffn if model.experts else None,
        "moe_router_pre_softmax": not model.is_topk_normalised,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
    }
    config = TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        ffn_hidden_size=model.ffn,
        num_attention_heads=model.heads,
        num_query_groups=model.groups,
        kv_channels=model.kv_channels,
        normalization="RMSNorm",
        layernorm_epsilon=model.epsilon,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model.has_qkv_bias,
        qk_layernorm=model.has_query_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        **(experts if model.num_experts else {}),
    )
    return GPTModel(
        config,
        get_gpt_layer_with_transformer_engine_spec(
            num_experts=model.num_experts or None,
            moe_grouped_gemm=bool(model.num_experts),
            qk_layernorm=model.has_query_norm,
        ),
        model.vocab,
        model.max_positions,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,
        rope_scaling=model.rope_factor is not None,
        rope_scaling_factor=model.rope_factor or 1.0,
        share_embeddings_and_output_weights=model.is_tied,
    )


if __name__ == "__main__":
    main()
