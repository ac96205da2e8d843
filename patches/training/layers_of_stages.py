"""How many layers every stage holds, for the summary at a run's start."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from vtp_plugin.errors import ConfigError
from vtp_plugin.host.rules.checks.stage_layers import COUNTED_AS_LAYERS, ELSEWHERE
from vtp_plugin.plan.layout.chunks import plain_chunks
from vtp_plugin.plan.layout.describe import format_layers, join_layers


def layers_of_stages(args: argparse.Namespace, num_stages: int) -> tuple[str, ...]:
    """Give the layers of every stage, chunk by chunk, as text; nothing where they are not known.

    Args:
        args: Megatron's, validated.
        num_stages: number of pipeline stages.

    >>> args = argparse.Namespace(num_layers=5, decoder_first_pipeline_num_layers=1)
    >>> layers_of_stages(args, 3), layers_of_stages(argparse.Namespace(num_layers=5), 2)
    (('1', '2', '2'), ())
    """

    def given(name: str) -> Any:
        return getattr(args, name, None)

    if any(map(given, (*ELSEWHERE, *COUNTED_AS_LAYERS))) or not given("num_layers"):
        return ()
    placed: Any = given("pipeline_model_parallel_layout")
    if placed is not None:
        rows = getattr(placed, "layout", None)
        return () if rows is None else tuple(join_layers(map(_num_layers, row)) for row in rows)
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
    return format_layers(stages)


def _num_layers(part: Iterable[Any]) -> int:
    """Count the layers of a part of Megatron's layout, which may also hold the embedding or the loss."""
    return sum(getattr(layer, "name", layer) == "decoder" for layer in part)
