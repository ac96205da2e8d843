"""Flags of adapters (LoRA): values, and what of them does not fit the model or the stages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.config import VtpConfig, read_keywords
from vtp_plugin.config.resolve import check_without_stages
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.rule import OptionContext
from vtp_plugin.host.rules.run_checks import check_run
from vtp_plugin.plan.layout.replica_map import ReplicaMap
from vtp_plugin.plan.model.lora import TARGETS, Lora, arguments_of, lora_of


def test_values() -> None:
    config = read_keywords({"lora_rank": 4, "lora_targets": "q_proj linear_fc1", "lora_layers": "0:2,5:6"})
    lora = config.lora
    assert lora is not None and lora.scale == 1
    assert lora.targets == ("q_proj", "gate_proj", "up_proj", "experts.gate_up_proj")
    assert lora.layer_numbers(7) == (0, 1, 5)
    assert VtpConfig().lora is None
    everything = read_keywords({"lora_rank": 4, "lora_alpha": 8}).lora
    assert (
        everything is not None and everything.scale == 2 and len(everything.targets) == len(TARGETS) - 1
    )  # two q_proj
    again = lora_of(arguments_of(lora))
    assert again is not None and (again.rank, again.targets, again.layers) == (4, lora.targets, lora.layers)


@pytest.mark.parametrize(
    ("site", "layers"), [("edge", (0, 5, 6)), ("cloud", (1, 2, 3, 4)), ("edge,2:4", (0, 2, 3, 5, 6))]
)
def test_layers_of_a_site(site: str, layers: tuple[int, ...]) -> None:
    u_shape = {"layerwise_disaggregated": True, "num_layer_list": (1, 4, 2)}
    lora = read_keywords({"lora_rank": 4, "lora_layers": site, **u_shape}).lora
    assert lora is not None and lora.layer_numbers(7) == layers
    stored = lora_of(arguments_of(lora))
    assert stored is not None and stored.layers == lora.layers, "a checkpoint would name a site, and not its layers"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lora_rank": 4, "lora_layers": "edge"}, "--vtp-lora-layers edge without --num-layer-list"),
        ({"lora_rank": 4, "lora_layers": "0:2,egde"}, "the entry 'egde'; it is no range of layers"),
        ({"lora_rank": 0}, "--vtp-lora-rank 0; a rank is at least 1"),
        ({"lora_rank": 4, "lora_alpha": -1}, "--vtp-lora-alpha -1; it is positive"),
        ({"lora_rank": 4, "lora_dropout": 1.0}, "--vtp-lora-dropout 1.0; it is a share below 1"),
        ({"lora_dropout": 0.1}, "--vtp-lora-dropout without --vtp-lora-rank"),
        ({"lora_alpha": 8}, "--vtp-lora-alpha without --vtp-lora-rank"),
        ({"lora_targets": "q_proj"}, "--vtp-lora-targets without --vtp-lora-rank"),
        ({"lora_layers": "0:1"}, "--vtp-lora-layers without --vtp-lora-rank"),
        ({"lora_save_base": True}, "--vtp-lora-save-base without --vtp-lora-rank"),
        ({"lora_rank": 4, "lora_targets": "q_pro"}, "--vtp-lora-targets q_pro; no stage holds such a layer"),
        ({"lora_rank": 4, "lora_layers": "2:2"}, "the entry '2:2'; it is no range of layers"),
        ({"lora_rank": 4, "layerwise_disaggregated": True, "encoder_layer_list": (0, 1, 0)}, "two rings"),
    ],
)
def test_wrong_values(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_keywords(given)
    assert said in str(caught.value) and str(caught.value).count("; ") >= 2


def test_adapters_need_a_list() -> None:
    (line,) = check_without_stages(read_keywords({"lora_rank": 4}))
    assert line.startswith("--vtp-lora-rank needs stages")


@pytest.mark.parametrize(
    ("changed", "lora", "said"),
    [
        ({}, {"layers": ((0, 5),)}, "--vtp-lora-layers ends at 5; the model has 4 layers"),
        (
            {"swiglu": False},
            {"named": ("gate_proj",)},
            "--vtp-lora-targets gate_proj; no stage of this model holds such",
        ),
        (
            {},
            {"named": ("linear_q_proj", "q_proj")},
            "--vtp-lora-targets linear_q_proj; no stage of this model holds such",
        ),
        (
            {},
            {"named": ("experts.down_proj",)},
            "--vtp-lora-targets experts.down_proj; no stage of this model holds such",
        ),
        (
            {"multi_latent_attention": True},
            {"named": ("k_proj",)},
            "name some of q_proj, kv_a_proj_with_mqa, kv_b_proj,",
        ),
        ({"num_query_groups": 1}, {}, "--num-query-groups 1 with stages of tp 1,2"),
        (
            {"num_experts": 4, "moe_grouped_gemm": True},
            {"targets": ("experts.down_proj",)},
            "--moe-grouped-gemm with --vtp-lora-rank; it computes the experts of a rank as one",
        ),
        (
            {"num_experts": 4, "moe_shared_expert_intermediate_size": 8},
            {"targets": ("up_proj",)},
            "--moe-shared-expert-intermediate-size 8 with --vtp-lora-rank; the plugin has no adapters for",
        ),
        (
            {"num_experts": 4},
            {"targets": ("experts.down_proj",), "dropout": 0.5},
            "--vtp-lora-dropout 0.5 with adapters of experts; ranks have other tokens for them",
        ),
        ({"transformer_impl": "transformer_engine"}, {}, "--transformer-impl transformer_engine with --vtp-lora-rank"),
    ],
)
def test_what_does_not_fit_the_model(changed: dict[str, Any], lora: dict[str, Any], said: str) -> None:
    args: dict[str, Any] = {"num_layers": 4, "num_attention_heads": 4, "group_query_attention": True}
    args |= {"num_query_groups": 2, "swiglu": True, "hidden_size": 8, "ffn_hidden_size": 8, **changed}
    given: dict[str, Any] = {"rank": 2, "alpha": 2, "targets": ("q_proj",), **lora}
    context = OptionContext(tp_sizes=(1, 2), lora=Lora(**given))
    lines = check_run(SimpleNamespace(**args), context, ReplicaMap(dp_sizes=(1, 1)))
    assert [line for line in lines if said in line], lines
