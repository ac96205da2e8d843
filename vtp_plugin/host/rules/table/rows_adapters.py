"""Options that do not work with the plugin's adapters (LoRA)."""

from __future__ import annotations

from vtp_plugin.host.rules.rule import OptionContext, OptionRule, above, case, given, on, only, refused_adapters
from vtp_plugin.plan.model.lora import EXPERTS


def _reaches_experts(_args: object, context: OptionContext) -> bool:
    return context.lora is not None and context.lora.reaches(EXPERTS)


def _reaches_feed_forward(_args: object, context: OptionContext) -> bool:
    return context.lora is not None and context.lora.reaches("mlp")


ADAPTER_RULES: tuple[OptionRule, ...] = (
    *refused_adapters(
        "it computes the experts of a rank as one, and the plugin's adapters lie beside the layers of each",
        only("--moe-grouped-gemm", _reaches_experts, on),
        way_out="leave it out, or adapt the attention alone, with --vtp-lora-targets linear_qkv linear_proj",
    ),
    *refused_adapters(
        "the plugin has no adapters for shared experts",
        only("--moe-shared-expert-intermediate-size", _reaches_feed_forward, given),
        way_out="name --vtp-lora-targets without gate_proj, up_proj, down_proj, linear_fc1 and linear_fc2, such as "
        "linear_qkv linear_proj experts.gate_up_proj experts.down_proj",
    ),
    *refused_adapters(
        "it makes one matrix of two published ones, of which each would need a pair of its own",
        "--mla-down-proj-fusion",
    ),
    *refused_adapters(
        "the plugin has no adapters for the layers of multi-token prediction", case("--mtp-num-layers", above(0))
    ),
    *refused_adapters(
        "its layers norm their input inside, which an adapter would have to see, and no test here can run them",
        "--transformer-impl transformer_engine",
        "--transformer-impl inference_optimized",
        way_out="add --transformer-impl local, or leave --vtp-lora-rank out",
    ),
    *refused_adapters(
        "adapters beside layers of low precision were never run here",
        case("--fp8-format", given, "fp8"),
        case("--fp4-format", given, "fp4"),
    ),
    *refused_adapters(
        "the plugin's adapters are for the layers of a GPT whose attention has queries, keys and values",
        "--attention-output-gate",
        "--experimental-attention-variant dsa",
        "--experimental-attention-variant gated_delta_net",
        case("--spec", given),
        case("--hybrid-override-pattern", given),
        case("--hybrid-layer-pattern", given),
        case("--heterogeneous-layers-config-path", given),
        case("--heterogeneous-layers-config-encoded-json", given),
    ),
    *refused_adapters(
        "adapters are saved without their base, which these forms do not allow",
        "--ckpt-format torch",
        "--ckpt-format torch_dcp",
        "--ckpt-format fsdp_dtensor",
        way_out="use --ckpt-format torch_dist, or leave --vtp-lora-rank out",
    ),
    *refused_adapters(
        "it shards the parameters of a model, of which adapters were never run here",
        case("--use-torch-fsdp2", on),
        case("--use-megatron-fsdp", on),
    ),
)
"""Rows as of :mod:`vtp_plugin.host.rules.table.rows`."""
