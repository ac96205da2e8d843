"""Layers of stages, also of a U."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.rules.checks.stage_layers import COUNTED_AS_LAYERS, ELSEWHERE, check_u_layers
from vtp_plugin.host.rules.rule import RING_RULES
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.plan.layout.layer_lists import check_layers, plain_chunks
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


def layers_of_stages(args: argparse.Namespace, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Give the layers of every stage, chunk by chunk; nothing where they are not known.

    Args:
        args: Megatron's, validated.
        num_stages: number of pipeline stages.

    >>> args = argparse.Namespace(num_layers=5, decoder_first_pipeline_num_layers=1)
    >>> layers_of_stages(args, 3), layers_of_stages(argparse.Namespace(num_layers=5), 2)
    (((1,), (2,), (2,)), ())
    """

    def given(name: str) -> Any:
        return getattr(args, name, None)

    if any(map(given, (*ELSEWHERE, *COUNTED_AS_LAYERS))) or not given("num_layers"):
        return ()
    placed: Any = given("pipeline_model_parallel_layout")
    if placed is not None:
        rows = getattr(placed, "layout", None)
        return () if rows is None else tuple(tuple(map(_num_layers, row)) for row in rows)
    try:
        stages = plain_chunks(
            args.num_layers,
            num_stages,
            given("virtual_pipeline_model_parallel_size") or 1,
            first=given("decoder_first_pipeline_num_layers"),
            last=given("decoder_last_pipeline_num_layers"),
        )
    except ConfigError:
        return ()
    return tuple(tuple(len(chunk.layers) for chunk in chunks) for chunks in stages)


def _num_layers(part: Iterable[Any]) -> int:
    """Count the layers of a part of Megatron's layout, which may also hold the embedding or the loss."""
    return sum(getattr(layer, "name", layer) == "decoder" for layer in part)
