"""``--have``: fit a layout to the devices that are there, as a run with ``--vtp-size-list auto --vtp-stages`` does."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass

from vtp_plugin.cli import activation_flags, model_flags
from vtp_plugin.cli.search_request import read_padded_model
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.parse_values import parse_bytes
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.tune.cluster.stage_memory import StageMemory
from vtp_plugin.tune.fit.as_flags import fitted_flags, order_flags
from vtp_plugin.tune.fit.available_cards import read_have
from vtp_plugin.tune.fit.chosen import Chosen
from vtp_plugin.tune.fit.constraints import Constraints
from vtp_plugin.tune.fit.fit_layout import fit, fit_split
from vtp_plugin.tune.fit.options_of_run import read_constraints, write_fitted
from vtp_plugin.tune.fit.reasons import describe
from vtp_plugin.tune.search.evaluate import Candidate

CARD_MEMORY = "--card-memory"
"""The flag with the memory of a device, for messages."""


def add_have_flags(group: argparse._ArgumentGroup) -> None:
    """Declare the flags."""
    group.add_argument(
        "--have",
        metavar="8,6,8",
        help="instead of TP sizes: devices of every node, with sites edge:1,cloud:8; a layout is fitted to them",
    )
    group.add_argument(
        "--card-memory",
        type=parse_bytes,
        metavar="80GiB",
        help="with --have or a page: memory of a device; each stage must fit",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The layout that was fitted to ``--have``.

    Attributes:
        candidate: the layout.
        reasons: why it was fitted, line by line.
        flags: flags that say it.
    """

    candidate: Candidate
    reasons: tuple[str, ...]
    flags: tuple[str, ...]


def fit_to_cards(args: argparse.Namespace, config: VtpConfig) -> tuple[VtpConfig, Fitted]:
    """Fit a layout to ``--have``.

    Returns:
        The options with the layout, and the layout.

    Raises:
        ConfigError: nothing fits, a flag says what is to be fitted, or what the memory depends on is not known.
    """
    if isinstance(config.size_list, tuple):
        raise ConfigError("--have and sizes in --vtp-size-list say the same thing twice; give one of them")
    nodes = [dataclasses.replace(node, memory_bytes=args.card_memory) for node in read_have(args.have)]
    sites = tuple(dict.fromkeys(node.site for node in nodes if node.site))
    if sites and config.sites is None:
        config = dataclasses.replace(config, sites=sites)
    has_memory = args.card_memory is not None
    if has_memory and (reason := model_flags.why_unknown(args, lacks_parts=False)):
        raise ConfigError(f"{CARD_MEMORY}: the memory of a rank is {reason}" if "not known" in reason else reason)

    constraints = read_constraints(args, config, config.stages or (1, max(2, 2 * len(nodes))))
    if has_memory:
        constraints = _with_memory(args, constraints)
    layouts = fit(nodes, constraints)
    best, reasons = layouts[0], describe(layouts, constraints)
    if config.split_backward:
        best = fit_split(nodes, constraints, best)
        reasons += (_about_split(best),)
        config = dataclasses.replace(config, split_backward=best.order.is_split)
    chosen = Chosen.of(best)
    is_forced = len({*chosen.sizes}) == 1 and not config.layerwise_disaggregated
    flags = fitted_flags(chosen, constraints, num_predicting=args.mtp_num_layers or 0, is_forced=is_forced)
    return write_fitted(config, chosen), Fitted(
        candidate=best, reasons=reasons, flags=(*flags, *order_flags(best, constraints))
    )


def _about_split(best: Candidate) -> str:
    if best.whole is None:
        return "--vtp-split-backward: gains nothing here, or the memory is too small; left out"
    return f"--vtp-split-backward: a simulated step takes {best.step_s:.6g}, {best.whole.step_s:.6g} without"


def _with_memory(args: argparse.Namespace, constraints: Constraints) -> Constraints:
    """Ask with what stages hold, with the activations of their microbatches in flight, if those are known."""
    layout = PipelineLayout.from_sizes((1,), world_size=constraints.cp, cp=constraints.cp)
    has_activations = not activation_flags.why_no_activations(args, layout)
    memory = StageMemory(
        read_padded_model(args, constraints),
        model_flags.read_training(args, layout),
        activation_flags.read_microbatch(args) if has_activations else None,
        cp=constraints.cp,
        ep=constraints.ep,
        etp=constraints.etp,
    )
    return dataclasses.replace(constraints, held_bytes=memory.held_bytes, counted_twice=memory.counted_twice)
