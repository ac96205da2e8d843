"""The layers of a U-shaped pipeline, as the arguments give them."""

from __future__ import annotations

import argparse
from typing import Any

from vtp_plugin.errors import refuse
from vtp_plugin.host.rules.checks.edge_layers import check_u_layers
from vtp_plugin.host.rules.table.versions import RING_RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.plan.layout.u_layers import check_layers
from vtp_plugin.session import Session


def read_layers(session: Session, host: MegatronHost, args: argparse.Namespace, *, has_lists: bool) -> tuple[int, ...]:
    """Read the layers of a U-shaped pipeline: the edge's first part, every cloud stage, the edge's last part.

    Args:
        session: the applied plugin.
        host: the family of the Megatron that runs.
        args: Megatron's arguments.
        has_lists: MindSpeed-MM's lists say the layers.

    Raises:
        ConfigError: the parts do not fit, or an option does not work with them.
    """
    layers = session.config.num_layer_list
    text: Any = getattr(args, "pipeline_model_parallel_layout", None)
    refuse(
        (
            *check_u_layers(layers, text, session.config.encoder_layer_list),
            *(() if has_lists else host.refusals(RING_RULES, args, session.planned.option_context)),
        )
    )
    option = "--num-layer-list"
    if layers is None:
        layers, option = host.layers_of_layout(text), "--pipeline-model-parallel-layout"
    check_layers(
        layers,
        num_stages=session.planned.layout.num_stages,
        num_layers=args.num_layers,
        option=option,
        least_on_edge=session.config.least_on_edge,
    )
    return layers
