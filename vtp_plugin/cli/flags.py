"""The flags of a run, as ``plan``, ``draw`` and ``simulate`` take them: the plugin's own, and those of Megatron's that
matter there.

A command line can be pasted as it is. Flags that do not change the result are left out with a note; what looks like one
of the flags that do is refused.
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vtp_plugin.boundary.rules import TransportRules
from vtp_plugin.config import VtpConfig
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.layout.pipeline import PipelineLayout
from vtp_plugin.layout.replicas import ReplicaMap
from vtp_plugin.layout.u_layers import check_layers, parse_layer_list
from vtp_plugin.options.checks.batch import check_batches
from vtp_plugin.options.checks.sizes import check_sizes
from vtp_plugin.options.derived import (
    ScheduleOptions,
    choose_cp_sizes,
    is_active,
    option_context,
    plan_layout,
    read_schedule_options,
    replica_map,
    stage_boundaries,
    transport_rules,
)
from vtp_plugin.options.flags import VTP_FLAGS, add_vtp_arguments, read_flags
from vtp_plugin.options.table.check import check_options
from vtp_plugin.schedule.cost.stated import parse_costs
from vtp_plugin.schedule.order.placement import Placement, place_workers

MAX_TYPOS = 2
"""Letters by which a word may differ from a flag and still be taken for it."""

# Megatron's, with what stands for the value; a switch has none.
_NUMBERS = {
    "--tensor-model-parallel-size": "may be left out, or the largest size of the list",
    "--pipeline-model-parallel-size": "may be left out, or the number of stages",
    "--context-parallel-size": "of all stages; default 1",
    "--num-virtual-stages-per-pipeline-rank": "model chunks of every stage (interleaved schedule)",
    "--num-layers-per-virtual-pipeline-stage": "the same said in layers; needs --num-layers",
    "--num-layers": "of the model",
    "--seq-length": "S of the tensors [S, B, H] that cross",
    "--micro-batch-size": "B of the tensors",
    "--hidden-size": "H of the tensors",
    "--global-batch-size": "samples of a step; with --micro-batch-size it tells the number of microbatches",
}
_SWITCHES = {
    "--use-tp-pp-dp-mapping": "rank order: a replica with all its stages is one block of ranks",
    "--sequence-parallel": "every rank of a stage holds its slice of the sequence between layers",
    "--bf16": "2 bytes for each number; without --bf16 and --fp16 4",
    "--fp16": "likewise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the flags of a run say.

    Attributes:
        config: the plugin's flags.
        layout: who is where.
        num_chunks: model chunks of every stage.
        placement: of the schedule.
        rules: how boundaries are crossed.
        schedule_options: what the order is planned for.
        shape: S, B and H of a microbatch on the stage with most replicas; None where a flag is missing.
        itemsize_bytes: of one number of the tensors.
        is_sharded: ranks of a stage hold slices of the sequence.
        num_microbatches: of a step, of one copy of the pipeline; None where flags are missing.
    """

    config: VtpConfig
    layout: PipelineLayout
    num_chunks: int
    placement: Placement
    rules: TransportRules
    schedule_options: ScheduleOptions
    shape: tuple[int, int, int] | None
    itemsize_bytes: int
    is_sharded: bool
    num_microbatches: int | None

    @property
    def replicas(self) -> ReplicaMap:
        """Which replicas of the stages work together."""
        return replica_map(self.config, self.layout)

    @property
    def is_ring(self) -> bool:
        """Whether the last stage sends to the first."""
        return self.placement.num_vstages > self.placement.num_stages

    @property
    def is_active(self) -> bool:
        """Whether the plugin's groups and communicator are used at all."""
        return is_active(self.config, self.layout)

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage; empty where none were named."""
        return self.config.sites or ()


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Declare all flags of a run that matter, and ``--json``."""
    add_vtp_arguments(parser)
    group = parser.add_argument_group(
        "Megatron's, as far as they matter here", "Others may stand here too; they change nothing."
    )
    for name, text in _NUMBERS.items():
        group.add_argument(name, type=int, metavar="N", help=text)
    for name, text in _SWITCHES.items():
        group.add_argument(name, action="store_true", help=text)
    group.add_argument("--pipeline-model-parallel-layout", metavar="LAYOUT", help="another way to say --num-layer-list")
    group = parser.add_argument_group("Of this command")
    group.add_argument("--world-size", type=int, metavar="N", help="number of ranks; default: the fewest that fit")
    group.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def read_run(args: argparse.Namespace, *, takes_all_costs: bool = False) -> Run:
    """Read the flags.

    Args:
        args: parsed, with the words that no flag declares as ``unknown``.
        takes_all_costs: costs may be given where a run has no choice of an order, too.

    Raises:
        ConfigError: a value is wrong, flags contradict each other, or a flag looks like a misspelt one.
    """
    check_unknown(args.unknown)
    config = read_flags(args, VtpConfig())
    if config.size_list is None:
        raise ConfigError("--vtp-size-list is missing; give the tensor-parallel size of every stage, such as 1,4,4")
    if not isinstance(config.size_list, tuple):
        raise ConfigError("--vtp-size-list auto needs a running launcher; write the list")
    layout = _layout(args, config, config.size_list)
    replicas = replica_map(config, layout)
    num_chunks = _num_chunks(args, layout.num_stages)
    _check(args, config, layout, replicas)
    shape, itemsize_bytes = _tensor(args)
    tensor_bytes = math.prod(shape) // max(layout.cp_sizes) * itemsize_bytes if shape else None
    placement = place_workers(replicas, num_chunks=num_chunks, is_u_shaped=config.layerwise_disaggregated)
    if takes_all_costs and config.costs is not None and not config.layerwise_disaggregated:
        costs = parse_costs(config.costs, placement, message_bytes=tensor_bytes)
        free = read_schedule_options(replace(config, costs=None), layout.num_stages, tensor_bytes)
        schedule_options = replace(free, costs=costs)
    else:
        schedule_options = read_schedule_options(config, layout.num_stages, tensor_bytes)
    return Run(
        config=config,
        layout=layout,
        num_chunks=num_chunks,
        placement=placement,
        rules=transport_rules(config, tensor_bytes),
        schedule_options=schedule_options,
        shape=shape,
        itemsize_bytes=itemsize_bytes,
        is_sharded=args.sequence_parallel,
        num_microbatches=_num_microbatches(args, replicas),
    )


def check_unknown(words: Sequence[str]) -> None:
    """Say which words change nothing, and refuse those that were meant to.

    Raises:
        ConfigError: a word is like a flag of the plugin or one that matters, or stands before any flag.
    """
    if words and not words[0].startswith("-"):
        raise ConfigError(f"{words[0]!r} belongs to no flag; give the flags that follow the script in a run")
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    for flag in flags:
        near = [name for name in known_flags() if num_typos(flag, name) <= MAX_TYPOS]
        if near or flag.startswith("--vtp"):
            hint = f"; do you mean {near[0]}?" if near else "; `python -m vtp_plugin run --help` lists the flags"
            raise ConfigError(f"{flag} is unknown{hint}")
    if flags:
        note = f"vtp_plugin: {len(flags)} flag(s) change nothing here: {', '.join(flags)}"
        print(textwrap.shorten(note, 160, placeholder=" ..."), file=sys.stderr)


def known_flags() -> tuple[str, ...]:
    """List the flags that matter here."""
    return (
        *(flag.name for flag in VTP_FLAGS),
        *_NUMBERS,
        *_SWITCHES,
        "--pipeline-model-parallel-layout",
        "--world-size",
        "--json",
        "--output",
        "--num-microbatches",
    )


def num_typos(word: str, other: str) -> int:
    """Count how many letters must be put in, left out or changed to make one word of another.

    >>> num_typos("--vtp-size-lsit", "--vtp-size-list"), num_typos("--seq-length", "--encoder-seq-length")
    (2, 8)
    """
    row = list(range(len(other) + 1))
    for number, letter in enumerate(word, start=1):
        before, row = row, [number]
        for column, wanted in enumerate(other):
            row.append(min(before[column] + (letter != wanted), before[column + 1] + 1, row[column] + 1))
    return row[-1]


def _layout(args: argparse.Namespace, config: VtpConfig, sizes: tuple[int, ...]) -> PipelineLayout:
    cp = args.context_parallel_size or 1
    cp_sizes = choose_cp_sizes(config.cp_list, cp, num_stages=len(sizes))
    dp_sizes = config.dp_list or (config.data_parallel_size or 1,) * len(sizes)
    least = sum(map(math.prod, zip(sizes, cp_sizes, dp_sizes, strict=True)))
    return plan_layout(
        config,
        world_size=least if args.world_size is None else args.world_size,
        pipeline_size=args.pipeline_model_parallel_size or 1,
        tensor_size=args.tensor_model_parallel_size,
        cp=cp,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
    )


def _check(args: argparse.Namespace, config: VtpConfig, layout: PipelineLayout, replicas: ReplicaMap) -> None:
    """Refuse what a run would refuse when it starts."""
    replicas.check(stage_boundaries(config, layout.num_stages))
    if config.layerwise_disaggregated and args.num_layer_list is not None:
        layers = parse_layer_list(args.num_layer_list)
        num_layers = args.num_layers or sum(layers)
        check_layers(layers, num_stages=layout.num_stages, num_layers=num_layers, option="--num-layer-list")
    context = option_context(config, layout)
    batches = () if replicas.is_equal else check_batches(args, replicas)
    refuse((*check_options(args, context), *check_sizes(args, context), *batches))


def _tensor(args: argparse.Namespace) -> tuple[tuple[int, int, int] | None, int]:
    """Return S, B and H of what crosses, None where a flag is missing, and the bytes of one of its numbers."""
    given = (args.seq_length, args.micro_batch_size, args.hidden_size)
    if any(number is not None and number < 1 for number in given):
        raise ConfigError("--seq-length, --micro-batch-size and --hidden-size must be at least 1")
    return given if all(given) else None, 2 if args.fp16 or args.bf16 else 4


def _num_chunks(args: argparse.Namespace, num_stages: int) -> int:
    """Count the model chunks of a stage as Megatron does."""
    number, layers = args.num_virtual_stages_per_pipeline_rank, args.num_layers_per_virtual_pipeline_stage
    if layers is None:
        return number or 1
    if number is not None or not args.num_layers or layers < 1 or args.num_layers % (num_stages * layers):
        raise ConfigError(
            f"--num-layers-per-virtual-pipeline-stage {layers} needs --num-layers, a multiple of it times the "
            f"{num_stages} stages, and no --num-virtual-stages-per-pipeline-rank beside it"
        )
    return args.num_layers // num_stages // layers


def _num_microbatches(args: argparse.Namespace, replicas: ReplicaMap) -> int | None:
    """Count the microbatches that one copy of the pipeline runs in a step."""
    batch, size = args.global_batch_size, args.micro_batch_size
    if not batch or not size:
        return None
    parts = size * (max(replicas.dp_sizes) if replicas.is_split else replicas.num_copies)
    if batch % parts:
        raise ConfigError(
            f"--global-batch-size {batch} is no multiple of --micro-batch-size {size} times the data-parallel size "
            f"{parts // size}"
        )
    return batch // parts
