"""Options that do not work with ``--vtp-split-backward``: whatever takes the place of Megatron's own linear layers."""

from __future__ import annotations

from dataclasses import replace

from vtp_plugin.host.rules.table.rule import OptionRule, case, given, refused_split

_IN_LAYERS = (
    *refused_split(
        "its kernel adds the gradients of weights while those of inputs are computed, and was never run here alone",
        "--gradient-accumulation-fusion",
        way_out="add --no-gradient-accumulation-fusion, or leave --vtp-split-backward out",
    ),
    *refused_split(
        "scaling factors of low precision belong to one whole backward",
        case("--fp8-format", given, "fp8"),
        case("--fp4-format", given, "fp4"),
    ),
    *refused_split("it decides itself when gradients of weights are computed", "--delay-wgrad-compute"),
)
SPLIT_RULES: tuple[OptionRule, ...] = (
    *refused_split(
        "the gradients of weights can be left for later only in Megatron's own linear layers, not in those of "
        "Transformer Engine, whose own way (delay_wgrad_compute) was never run here",
        "--transformer-impl transformer_engine",
        "--transformer-impl inference_optimized",
        way_out="add --transformer-impl local, or leave --vtp-split-backward out",
    ),
    *_IN_LAYERS,
)
"""Rows as of :mod:`vtp_plugin.host.rules.table.rows`."""

SPLIT_CONFIG_RULES = tuple(replace(rule, option=f"config.{rule.attribute}") for rule in _IN_LAYERS)
"""The same for what a script sets in the model's configuration, which does not say whose layers are used."""
