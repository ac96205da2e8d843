"""Reads from a run's arguments what a list must satisfy, and writes the fitted list into its options."""

from __future__ import annotations

import dataclasses
from typing import Any

from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import LayoutError, refuse
from vtp_plugin.host.versions import capability
from vtp_plugin.plan.layout.pipeline_layout import RankOrder
from vtp_plugin.tune.fit.chosen import Chosen
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.search.problem import LayerRule

# What says sizes or layers, which are fitted here.
_FIXED = {
    "tensor_model_parallel_size": None,
    "pipeline_model_parallel_size": 1,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
}


def layer_rule(version: str) -> LayerRule:
    """Return how many layers the stages of a Megatron may hold: in 0.12 the first and the last one alone may differ."""
    return "any" if capability("layouts").has(version) else "ends"


def read_constraints(
    args: Any,
    config: VtpConfig,
    stages: tuple[int, int],
    layers: LayerRule = "any",
) -> Constraints:
    """Read what a list must satisfy.

    Args:
        args: Megatron's parsed arguments.
        config: the plugin's options.
        stages: the fewest and the most pipeline stages.
        layers: how many layers stages may hold.

    Raises:
        ConfigError: an argument says what is to be fitted, or what a fit needs is missing.
    """
    found = {name: getattr(args, name, None) for name in _FIXED}
    refuse(
        (
            f"--{name.replace('_', '-')} {found[name]} with --vtp-size-list auto --vtp-stages; sizes and layers are "
            "chosen for the devices that are there; leave it out"
            for name, unset in _FIXED.items()
            if found[name] not in (None, unset)
        ),
        LayoutError,
    )
    if config.encoder_layer_list is not None:
        raise LayoutError(
            "--vtp-encoder-layer-list with --vtp-stages; the layers of an encoder cannot be chosen automatically; give "
            "the TP size of every stage instead of auto"
        )
    parts = config.num_layer_list
    if config.layerwise_disaggregated and (parts is None or len(parts) < 2):
        raise LayoutError(
            "--layerwise-disaggregated-training with --vtp-stages needs --num-layer-list for the edge's two parts, "
            "such as 1,3,3,1; the parts between are chosen"
        )
    least, most = stages
    is_replica_major = getattr(args, "use_tp_pp_dp_mapping", False)
    return Constraints(
        args=args,
        least_stages=max(least, 2) if config.layerwise_disaggregated else least,
        most_stages=most,
        num_replicas=config.data_parallel_size,
        sites=config.sites or (),
        cp=args.context_parallel_size or 1,
        ep=args.expert_model_parallel_size or 1,
        etp=args.expert_tensor_parallel_size,
        order=RankOrder.REPLICA_MAJOR if is_replica_major else RankOrder.STAGE_MAJOR,
        ends=(parts[0], parts[-1]) if config.layerwise_disaggregated and parts else None,
        layers=layers,
    )


def write_fitted(config: VtpConfig, chosen: Chosen) -> VtpConfig:
    """Return the options of a run with the fitted list.

    A list of equal sizes is used like any other: the next one may be unequal, and both must store checkpoints alike.

    Args:
        config: the options, with the list ``"auto"``.
        chosen: the fitted list.
    """
    return dataclasses.replace(
        config,
        size_list=chosen.sizes,
        stages=None,
        data_parallel_size=chosen.num_replicas,
        sites=chosen.sites if config.sites else None,
        num_layer_list=chosen.layers if config.layerwise_disaggregated else None,
        in_flight=chosen.in_flight or config.in_flight,
        force=True,
    )
