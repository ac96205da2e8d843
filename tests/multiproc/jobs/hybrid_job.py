"""What stock Megatron says to layers that are not those of a GPT, on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from tests.multiproc.cases.case_parts import HEADS, HIDDEN, SEQ, VOCAB
from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import cpu_only, model_parallel
from tests.support.pool import init_gloo


def errors_of_stock() -> dict[str, str]:
    """Build models in stock Megatron, on one rank, and give the error of each; empty if there is none.

    Returns:
        By the pattern of the layers, with Megatron's own layers; for ``local *-`` with local ones instead; and for the
        attention variant.
    """
    init_gloo()
    with cpu_only(), model_parallel(Case.of(sizes=(1,), plugin="stock")):
        errors = {pattern: _error_of(lambda p=pattern: _hybrid(hybrid_stack_spec, p)) for pattern in ("M-", "G-", "*-")}
        errors["local *-"] = _error_of(lambda: _hybrid(_local_stack(), "*-"))
        errors["gated_delta_net"] = _error_of(_gated_delta_net)
    return errors


def _error_of(build: Callable[[], object]) -> str:
    try:
        build()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _config(**fields: Any) -> TransformerConfig:
    sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
    return TransformerConfig(**sizes, use_cpu_initialization=True, pipeline_dtype=torch.float32, **fields)


def _hybrid(spec: ModuleSpec, pattern: str) -> HybridModel:
    groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = {"vocab_size": VOCAB, "max_sequence_length": SEQ}
    return HybridModel(_config(), spec, **sizes, hybrid_layer_pattern=pattern, pg_collection=groups)


def _local_stack() -> ModuleSpec:
    layer: Any = get_gpt_layer_local_spec().submodules
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm, self_attention=layer.self_attention, self_attn_bda=layer.self_attn_bda
    )
    feed_forward = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda
    )
    submodules: Any = hybrid_stack_spec.submodules
    return ModuleSpec(
        module=HybridStack,
        submodules=replace(
            submodules,
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=feed_forward),
        ),
    )


def _gated_delta_net() -> object:
    config = _config(
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=2,
        linear_conv_kernel_dim=2,
        linear_key_head_dim=4,
        linear_value_head_dim=4,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        transformer_impl="local",
    )
    return get_transformer_block_with_experimental_attention_variant_spec(config)
