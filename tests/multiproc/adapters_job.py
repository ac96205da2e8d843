"""Put PEFT's adapters into a model of Megatron's local layers."""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.multiproc.core_cases import Case
from tests.multiproc.core_job import cpu_only, model_parallel
from tests.pool import init_gloo


def build_adapters() -> None:
    """Build a model on this rank and give its linear layers adapters."""
    from peft import LoraConfig, inject_adapter_in_model

    init_gloo()
    config = TransformerConfig(
        num_layers=1, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, persist_layer_norm=False
    )
    targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
    with cpu_only(), model_parallel(Case(sizes=(1,), plugin="stock")):
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)
        adapters = LoraConfig(r=4, target_modules=targets, megatron_config=config, megatron_core="megatron.core")
        inject_adapter_in_model(adapters, model)
