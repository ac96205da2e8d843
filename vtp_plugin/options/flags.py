"""The plugin's own flags on Megatron's command line: what they are called, and what they say."""

from __future__ import annotations

import argparse

from vtp_plugin.config import (
    VtpConfig,
    merge,
    parse_cost_words,
    parse_cp_list,
    parse_dp_list,
    parse_in_flight,
    parse_sites,
    parse_size_list,
)
from vtp_plugin.errors import ConfigError


def add_vtp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Declare the plugin's flags. Their values stay unset when a flag is not given."""
    group = parser.add_argument_group(title="vtp_plugin: tensor-parallel size per pipeline stage")
    group.add_argument(
        "--vtp-size-list",
        metavar="1,4,4",
        help="tensor-parallel size of every pipeline stage, or 'auto': stage k is the launcher's node k",
    )
    group.add_argument(
        "--vtp-cp-list",
        metavar="1,2,2",
        help="context-parallel size of every pipeline stage; default: --context-parallel-size for all",
    )
    group.add_argument(
        "--vtp-dp-list",
        metavar="1,2,2",
        help="data-parallel size of every pipeline stage; default: one size for all, from the number of ranks",
    )
    group.add_argument(
        "--vtp-dp-mode",
        help="how stages of different data-parallel sizes work together: multiplex (default) lets a narrow stage run "
        "its microbatches in turn for each replica of a wide one; split lets it run larger ones (--micro-batch-size is "
        "that of the widest stage), of which each replica gets a part",
    )
    group.add_argument("--vtp-device", help="auto, cuda, npu or cpu; auto asks in this order: npu, cuda, cpu")
    group.add_argument(
        "--vtp-transport",
        help="how activations cross between stages: rank0 goes through one rank of each, sliced gives every link its "
        "share; auto takes rank0 between sites and for small tensors, else sliced",
    )
    group.add_argument(
        "--vtp-sites", metavar="edge,cloud,cloud", help="site of every pipeline stage; default: all in one"
    )
    group.add_argument(
        "--vtp-site",
        metavar="edge",
        help="site of this machine, one of --vtp-sites: ranks that find themselves on another site's stage end the run",
    )
    group.add_argument(
        "--vtp-timeout-s", type=float, help="a rank that does not answer for so long ends the run; default 600"
    )
    group.add_argument(
        "--vtp-force", action="store_true", default=None, help="use the plugin for a uniform list too (for tests)"
    )
    group.add_argument("--vtp-data-parallel-size", type=int, help="replicas of every stage; needed by 'auto' only")
    group.add_argument(
        "--vtp-schedule",
        help="stock keeps Megatron's pipeline schedules; planned runs the same orders with every receive posted before "
        "the compute that precedes it, and sends that nothing waits for",
    )
    group.add_argument(
        "--vtp-audit",
        metavar="FILE",
        help="write down every message between stages, one JSON object a line; rank 3 writes FILE with .rank3 before "
        "its suffix; sites may differ",
    )
    group.add_argument(
        "--layerwise-disaggregated-training",
        action="store_true",
        default=None,
        help="stage 0, the edge, holds the first and the last layers, with embedding, head, loss and data; give the "
        "layers by --num-layer-list or by --pipeline-model-parallel-layout with one part more than stages",
    )
    group.add_argument(
        "--num-layer-list",
        metavar="1,3,3,1",
        help="layers of the edge's first part, of every cloud stage, and of the edge's last part",
    )
    group.add_argument(
        "--vtp-in-flight",
        metavar="8,4,4",
        help="most microbatches in flight on each stage then, or one number for all: so many activations of each of "
        "its chunks a stage may keep; default: as many as keep the busiest stage busy, and two",
    )
    group.add_argument(
        "--vtp-costs",
        nargs="+",
        metavar="forward_ms=40,80,40",
        help="what the order is planned for then: forward_ms= and backward_ms= by part of the model (default twice the "
        "forward), latency_ms= and mbit= by way between two parts (one number: the ways from and to the edge), "
        "message_kib=; default: the first steps measure them and print this flag",
    )
    return parser


def read_flags(args: argparse.Namespace, told: VtpConfig) -> VtpConfig:
    """Add the flags to what ``apply()`` was told.

    Args:
        args: as parsed, with the flags of :func:`add_vtp_arguments`.
        told: to ``apply()``.

    Raises:
        ConfigError: a flag's value is wrong, contradicts what was told, or needs another flag.
    """
    flags = {
        "size_list": parse_size_list(args.vtp_size_list),
        "cp_list": parse_cp_list(args.vtp_cp_list),
        "dp_list": parse_dp_list(args.vtp_dp_list),
        "dp_mode": args.vtp_dp_mode,
        "device": args.vtp_device,
        "transport": args.vtp_transport,
        "sites": parse_sites(args.vtp_sites),
        "timeout_s": args.vtp_timeout_s,
        "force": args.vtp_force,
        "data_parallel_size": args.vtp_data_parallel_size,
        "schedule": args.vtp_schedule,
        "layerwise_disaggregated": args.layerwise_disaggregated_training,
        "audit": args.vtp_audit,
        "in_flight": parse_in_flight(args.vtp_in_flight),
        "costs": parse_cost_words(args.vtp_costs),
    }
    config = merge(told, flags)
    if args.num_layer_list is not None and not config.layerwise_disaggregated:
        raise ConfigError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
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
            raise ConfigError(f"{flag} {shown} needs stages: give --vtp-size-list, such as {ones}")
    if config.has_planned_schedule:
        raise ConfigError("planned schedules need stages: give --vtp-size-list, such as 1,1")
