"""The plugin's own flags on Megatron's command line: what they are called, what they say, and how they are read.

:data:`VTP_FLAGS` is the only place that declares them; parsers, ``--help`` and the documentation are made of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vtp_plugin.config import (
    VtpConfig,
    merge,
    parse_bytes,
    parse_cost_words,
    parse_cp_list,
    parse_dp_list,
    parse_in_flight,
    parse_sites,
    parse_size_list,
)
from vtp_plugin.errors import LayoutError
from vtp_plugin.schedule.cost.stated import COST_KEYS


class FlagGroup(Enum):
    """What a flag is about; the value is the title above the group in ``--help``."""

    WHERE = "vtp_plugin: where (which ranks form which stage)"
    WHAT = "vtp_plugin: what crosses (how tensors get from stage to stage)"
    WHEN = "vtp_plugin: when (the order of a step)"
    TRUST = "vtp_plugin: trust (a run over several sites)"
    FAILURE = "vtp_plugin: what a run says, and failure (ranks that stop or do not come)"


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        name: as written on the command line.
        group: heading in ``--help``.
        help: what it does.
        metavar: what stands for its value in ``--help``; None for a switch.
        keyword: of :func:`vtp_plugin.apply`; None where only the command line has it.
        field: of :class:`~vtp_plugin.config.VtpConfig`; None where it is read elsewhere.
        type: makes a value of one word.
        nargs: as for :meth:`argparse.ArgumentParser.add_argument`.
        parse: makes the field's value of the flag's; gets None where the flag is not given.
    """

    name: str
    group: FlagGroup
    help: str
    metavar: str | None = None
    keyword: str | None = None
    field: str | None = None
    type: Callable[[str], object] = str
    nargs: str | None = None
    parse: Callable[[Any], object] = _same

    @property
    def dest(self) -> str:
        """Name of its attribute among the parsed arguments."""
        return self.name.removeprefix("--").replace("-", "_")

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Declare it; its value stays None when it is not given."""
        if self.metavar is None:
            group.add_argument(self.name, action="store_true", default=None, help=self.help)
        else:
            group.add_argument(self.name, metavar=self.metavar, type=self.type, nargs=self.nargs, help=self.help)


VTP_FLAGS: tuple[Flag, ...] = (
    Flag(
        name="--vtp-size-list",
        group=FlagGroup.WHERE,
        metavar="1,4,4",
        keyword="vtp_size_list",
        field="size_list",
        parse=parse_size_list,
        help="tensor-parallel size of every pipeline stage, first stage first; or 'auto': stage k is the launcher's "
        "node k",
    ),
    Flag(
        name="--vtp-cp-list",
        group=FlagGroup.WHERE,
        metavar="1,2,2",
        keyword="vtp_cp_list",
        field="cp_list",
        parse=parse_cp_list,
        help="context-parallel size of every stage; default: --context-parallel-size for all",
    ),
    Flag(
        name="--vtp-dp-list",
        group=FlagGroup.WHERE,
        metavar="1,2,2",
        keyword="vtp_dp_list",
        field="dp_list",
        parse=parse_dp_list,
        help="data-parallel size (number of replicas) of every stage; default: one size for all, from the number of "
        "ranks",
    ),
    Flag(
        name="--vtp-data-parallel-size",
        group=FlagGroup.WHERE,
        metavar="N",
        keyword="data_parallel_size",
        field="data_parallel_size",
        type=int,
        help="replicas of every stage; needed with '--vtp-size-list auto' only",
    ),
    Flag(
        name="--vtp-device",
        group=FlagGroup.WHERE,
        metavar="auto|cuda|npu|cpu",
        keyword="device",
        field="device",
        help="device to train on, one kind for the whole run; auto (default) asks in this order: npu, cuda, cpu",
    ),
    Flag(
        name="--vtp-force",
        group=FlagGroup.WHERE,
        keyword="force",
        field="force",
        help="use the plugin for stages of one size too (for tests and benchmarks)",
    ),
    Flag(
        name="--layerwise-disaggregated-training",
        group=FlagGroup.WHERE,
        keyword="layerwise_disaggregated",
        field="layerwise_disaggregated",
        help="U-shaped pipeline: stage 0, the edge, holds the first and the last layers, with embedding, head, loss "
        "and data; give the layers by --num-layer-list or by --pipeline-model-parallel-layout with one part more than "
        "stages",
    ),
    Flag(
        name="--num-layer-list",
        group=FlagGroup.WHERE,
        metavar="1,3,3,1",
        help="U-shaped pipeline: layers of the edge's first part, of every cloud stage, and of the edge's last part",
    ),
    Flag(
        name="--vtp-transport",
        group=FlagGroup.WHAT,
        metavar="auto|rank0|sliced",
        keyword="transport",
        field="transport",
        help="how tensors cross between stages: rank0 goes through one rank of each stage, sliced gives every link "
        "its share; auto (default) takes rank0 between sites and for small tensors; where the stages' sizes differ, a "
        "run tries both at its start and takes the faster one",
    ),
    Flag(
        name="--vtp-transport-threshold",
        group=FlagGroup.WHAT,
        metavar="4MiB",
        keyword="transport_threshold_bytes",
        field="transport_threshold_bytes",
        parse=parse_bytes,
        help="with --vtp-transport auto: tensors from this size on cross in slices where there is a choice, smaller "
        "ones by rank0, and nothing is tried; bytes, or a number with KiB or MiB",
    ),
    Flag(
        name="--vtp-dp-mode",
        group=FlagGroup.WHAT,
        metavar="multiplex|split",
        keyword="dp_mode",
        field="dp_mode",
        help="how stages of different data-parallel sizes work together: multiplex (default) lets a narrow stage run "
        "its microbatches in turn for each replica of a wide one; split lets it run larger ones (--micro-batch-size "
        "is that of the widest stage), of which each replica gets a part",
    ),
    Flag(
        name="--vtp-schedule",
        group=FlagGroup.WHEN,
        metavar="stock|planned",
        keyword="schedule",
        field="schedule",
        help="stock (default) keeps Megatron's pipeline schedules; planned runs the same orders with every receive "
        "posted before the compute that precedes it, and sends that nothing waits for",
    ),
    Flag(
        name="--vtp-in-flight",
        group=FlagGroup.WHEN,
        metavar="8,4,4",
        keyword="in_flight",
        field="in_flight",
        parse=parse_in_flight,
        help="U-shaped pipeline: most microbatches in flight on each stage, or one number for all. A stage keeps that "
        "many activations of each of its chunks. Default: the number that keeps the busiest stage busy, plus two",
    ),
    Flag(
        name="--vtp-costs",
        group=FlagGroup.WHEN,
        metavar="KEY=VALUE",
        keyword="costs",
        field="costs",
        nargs="+",
        parse=parse_cost_words,
        help="U-shaped pipeline: the durations and links that the order is planned for, such as forward_ms=40,80,40 "
        "latency_ms=20. Default: the first steps measure them, and the run prints them as this flag. Keys:\n"
        + "\n".join(f"{name} ({key.unit}): {key.meaning};" for name, key in COST_KEYS.items()),
    ),
    Flag(
        name="--vtp-replan-share",
        group=FlagGroup.WHEN,
        metavar="0.25",
        keyword="replan_share",
        field="replan_share",
        type=float,
        help="U-shaped pipeline: where a step takes longer or shorter by more than this share than planned, its "
        "measured costs are measured again and the order is planned anew, at most three times; default 0.25, inf for "
        "never",
    ),
    Flag(
        name="--vtp-sites",
        group=FlagGroup.TRUST,
        metavar="edge,cloud,cloud",
        keyword="sites",
        field="sites",
        parse=parse_sites,
        help="site of every stage; default: all in one",
    ),
    Flag(
        name="--vtp-site",
        group=FlagGroup.TRUST,
        metavar="edge",
        help="site of this machine, one of --vtp-sites: ranks that find themselves on another site's stage end the run",
    ),
    Flag(
        name="--vtp-share-errors",
        group=FlagGroup.TRUST,
        keyword="share_errors",
        field="share_errors",
        help="several sites: let the texts of this rank's errors, and the values of its arguments, cross to the "
        "others; without it they read the type of the error and where it happened. Each site decides for itself",
    ),
    Flag(
        name="--vtp-audit",
        group=FlagGroup.TRUST,
        metavar="FILE",
        keyword="audit",
        field="audit",
        help="write down every message between stages, one JSON object a line; rank 3 writes FILE with .rank3 before "
        "its suffix; sites may differ",
    ),
    Flag(
        name="--vtp-timeout-s",
        group=FlagGroup.FAILURE,
        metavar="SECONDS",
        keyword="timeout_s",
        field="timeout_s",
        type=float,
        help="a rank that does not answer for so long ends the run on all ranks; default 600",
    ),
    Flag(
        name="--vtp-log-level",
        group=FlagGroup.FAILURE,
        metavar="INFO",
        keyword="log_level",
        field="log_level",
        help="how much the plugin says: DEBUG, INFO (default), WARNING or ERROR. INFO comes from rank 0 and from the "
        "first rank of every other site, DEBUG from all ranks",
    ),
)
"""All flags, in the order of ``--help``."""


def add_vtp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the plugin's flags, group by group. Their values stay unset when a flag is not given."""
    groups = {flag.group: None for flag in VTP_FLAGS}
    for group in groups:
        section = parser.add_argument_group(title=group.value)
        for flag in VTP_FLAGS:
            if flag.group is group:
                flag.add_to(section)
    return parser


def read_flags(args: argparse.Namespace, told: VtpConfig) -> VtpConfig:
    """Add the flags to what ``apply()`` was told.

    Args:
        args: as parsed, with the flags of :func:`add_vtp_arguments`; those that were not given may be missing.
        told: to ``apply()``.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what was told, or needs another flag.
    """
    given = {flag.field: flag.parse(getattr(args, flag.dest, None)) for flag in VTP_FLAGS if flag.field is not None}
    config = merge(told, given)
    if getattr(args, "num_layer_list", None) is not None and not config.layerwise_disaggregated:
        raise LayoutError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
    return config


def check_without_stages(config: VtpConfig) -> None:
    """Refuse what needs stages, in a run without a list of their sizes.

    Raises:
        ConfigError: a list of other sizes or a planned schedule was asked for.
    """
    for flag, sizes in (("--vtp-cp-list", config.cp_list), ("--vtp-dp-list", config.dp_list)):
        if sizes:
            ones = ",".join("1" for _ in sizes)
            shown = ",".join(map(str, sizes))
            raise LayoutError(f"{flag} {shown} needs stages: give --vtp-size-list, such as {ones}")
    if config.has_planned_schedule:
        raise LayoutError("planned schedules need stages: give --vtp-size-list, such as 1,1")
