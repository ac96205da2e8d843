"""``--have``: fit a list to the cards that are there, as a run with ``--vtp-size-list auto --vtp-stages`` does."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence

from vtp_plugin.cli import activation_flags, model_flags
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError
from vtp_plugin.fit.cards import read_have
from vtp_plugin.fit.choose import fit
from vtp_plugin.fit.read import read_ask, write_fitted
from vtp_plugin.fit.reasons import describe
from vtp_plugin.fit.search import Fitted
from vtp_plugin.ground.values import parse_bytes
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.schedule.make.generate import one_f_one_b_limits
from vtp_plugin.schedule.order.placement import plain_placement


def add_have_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    group.add_argument(
        "--have",
        metavar="8,6,8",
        help="instead of a list: cards of every node, with sites edge:1,cloud:8; a list is fitted to them, as a run "
        "with --vtp-size-list auto --vtp-stages MIN:MAX does; default: from one stage to two a node",
    )
    group.add_argument(
        "--card-memory",
        type=parse_bytes,
        metavar="80GiB",
        help="with --have: memory of a card; layers are shared out so that each stage's weights, gradients, optimizer "
        "state and activations fit into it",
    )


def fit_to_cards(args: argparse.Namespace, config: VtpConfig) -> tuple[VtpConfig, Fitted, tuple[str, ...]]:
    """Fit a list to ``--have``.

    Returns:
        The options with the list, what was fitted, and lines that say why.

    Raises:
        ConfigError: nothing fits, a flag says what is to be fitted, or what the memory depends on is not known.
    """
    if isinstance(config.size_list, tuple):
        raise ConfigError("--have and a list in --vtp-size-list say the same thing twice; give one of them")
    nodes = [dataclasses.replace(node, memory_bytes=args.card_memory) for node in read_have(args.have)]
    has_memory = args.card_memory is not None
    if has_memory and (reason := model_flags.why_unknown(args, lacks_parts=False)):
        raise ConfigError(f"--card-memory: the memory of a rank is {reason}" if "not known" in reason else reason)

    def stage_bytes(layout: PipelineLayout, layers: tuple[int, ...]) -> Sequence[int]:
        return _held_bytes(args, layout, layers)

    ask = read_ask(
        args, config, config.stages or (1, max(2, 2 * len(nodes))), stage_bytes=stage_bytes if has_memory else None
    )
    fitted, rivals = fit(nodes, ask)
    return write_fitted(config, fitted), fitted, describe(fitted, ask, rivals)


def _held_bytes(args: argparse.Namespace, layout: PipelineLayout, layers: tuple[int, ...]) -> list[int]:
    """Give what the fullest rank of every stage holds, with the activations of its microbatches in flight, if known."""
    parts, stages = (layers, None) if len(layers) > layout.num_stages else (None, layers)
    held = model_flags.read_footprints(
        args, layout, 1, parts, stages, has_activations=not activation_flags.why_no_activations(args, layout)
    )
    in_flight = one_f_one_b_limits(plain_placement(layout.num_stages))
    return [
        max(held[rank].held_bytes(in_flight[stage]) for rank in layout.stage_ranks(stage))
        for stage in range(layout.num_stages)
    ]
