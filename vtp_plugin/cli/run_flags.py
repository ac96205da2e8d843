"""The flags of a run that ``plan``, ``draw`` and ``simulate`` take: the plugin's, and those of Megatron's that matter.

A whole command line can be pasted. Flags that do not change the result are ignored with a note; what looks like a
misspelt flag that does change it is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from vtp_plugin.cli import model_flags
from vtp_plugin.cli.command_base import Parser, add_json_flag, is_page, with_values
from vtp_plugin.cli.search_request import CARD_MEMORY, Fitted, add_have_flags, allowing_split, fit_to_cards
from vtp_plugin.config import VtpConfig, resolve
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.host.megatron_flags import MODEL_FLAGS, RUN_FLAGS
from vtp_plugin.host.rules.checks.stage_layers import count_chunks
from vtp_plugin.host.rules.run_checks import check_run, judged_flags, with_judged
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.layer_lists import Chunk, check_layers, check_two_rings
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import ReplicaMap, expert_spans
from vtp_plugin.plan.memory.footprint import Footprint
from vtp_plugin.plan.schedule.order.placement import Placement, place_workers
from vtp_plugin.util.text import own_command, question

_OTHERS = ("--world-size", "--json", "--output", "--num-microbatches", "--bridge", "--nodes", "--slurm")
# Not --have, which is too near Megatron's --save to be looked for in its typos.
_OF_A_FIT = (CARD_MEMORY,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as its flags describe it.

    Attributes:
        config: the options of the plugin.
        layout: the pipeline layout, which has the ranks of every stage.
        placement: which stage holds which virtual stage.
        rules: how a run chooses the transport of every boundary.
        schedule_options: options of the planned schedule.
        shape: shape `[S, B, H]` of a microbatch on the stage with most replicas; None if a flag is missing.
        itemsize_bytes: bytes of one element of the tensors.
        is_sharded: whether ranks of a stage hold slices of the sequence.
        global_batch_size: number of samples of a step; None if the flag is missing.
        num_microbatches: number of microbatches of a step in one team of replicas; None if a flag is missing.
        memory: memory of every rank, or why it is not known.
        about_activations: what the activations include, or why they are not known.
        fitted: the layout that was fitted to ``--have``; None where the TP sizes were given.
    """

    config: VtpConfig
    layout: PipelineLayout
    placement: Placement
    rules: TransportRules
    schedule_options: resolve.ScheduleOptions
    shape: tuple[int, int, int] | None
    itemsize_bytes: int
    is_sharded: bool
    global_batch_size: int | None
    num_microbatches: int | None
    memory: tuple[Footprint, ...] | str
    about_activations: str
    fitted: Fitted | None

    @property
    def replicas(self) -> ReplicaMap:
        """Which replicas of the stages work together."""
        return resolve.replica_map(self.config, self.layout)

    @property
    def is_ring(self) -> bool:
        """Whether the last stage sends to the first."""
        return self.placement.num_vstages > self.placement.num_stages

    @property
    def is_active(self) -> bool:
        """Whether the run uses the plugin's groups and communicator."""
        return resolve.is_active(self.config, self.layout)

    @property
    def sites(self) -> tuple[str, ...]:
        """Site of every stage; empty if none were named."""
        return self.config.sites or ()


MOST_USED = {
    "--vtp-size-list": "TP size of every pipeline stage, the first stage first",
    "--vtp-dp-list": "number of replicas of every stage",
    "--vtp-sites": "site of every stage: between sites only one rank of each talks",
    "--layerwise-disaggregated-training": "U-shape: stage 0 has the first and the last layers",
    "--num-layer-list": "layers of a U's parts",
}
"""Flags of a run that the short help of a command shows, with short texts."""
_MODEL_USED = {
    "--num-layers": "of the model; give all flags that say the model, as to a run",
    "--hidden-size": "likewise, as the next ones",
    "--num-attention-heads": "",
    "--vocab-size": "",
    "--seq-length": "",
    "--micro-batch-size": "",
    "--global-batch-size": "",
}


def add_run_flags(parser: Parser, *, has_layout: bool = True) -> None:
    """Declare the flags of a run that matter, and ``--json``.

    Args:
        parser: parser that gets the flags.
        has_layout: whether the command is for one layout; else its short help shows flags of the model.
    """
    before = [*parser._action_groups]
    resolve.add_vtp_arguments(parser)
    about = "Others may be given too; those that a run does not support end the command."
    group = parser.add_argument_group("Megatron's flags that matter here", about)
    for flag in RUN_FLAGS:
        flag.declare(group)
    group = parser.add_argument_group("Megatron's flags that say what a rank holds")
    for flag in MODEL_FLAGS:
        flag.declare(group)
    group = parser.add_argument_group("Of the layout")
    group.add_argument("--world-size", type=int, metavar="N", help="number of ranks; default: the fewest that fit")
    add_have_flags(group)
    if has_layout:
        before.append(group)
    parser.shorten(
        [group for group in parser._action_groups if group not in before], MOST_USED if has_layout else _MODEL_USED
    )
    add_json_flag(parser.add_argument_group("Of the output"))


def read_run(args: argparse.Namespace, *, takes_all_costs: bool = False) -> Run:
    """Read the flags, and refuse what a run would refuse.

    Args:
        args: parsed arguments; ``argv`` holds all words, ``unknown`` those that no flag declares.
        takes_all_costs: whether costs are read even if the order is fixed, where a run refuses them.

    Raises:
        ConfigError: a value is wrong, flags contradict each other, or a flag looks misspelt.
    """
    resolve.reject_spaces(args.argv)
    check_unknown(args.unknown)
    config, fitted = _read_sizes(args)
    assert isinstance(config.size_list, tuple)
    layout = _layout(args, config, config.size_list)
    replicas = resolve.replica_map(config, layout)
    _check(args, config, layout, replicas)
    shape, itemsize_bytes = read_tensor(args)
    tensor_bytes = math.prod(shape) // max(layout.cp_sizes) * itemsize_bytes if shape else None
    if fitted is None:
        model_flags.check_layers(args, resolve.option_context(config, layout))
    num_chunks = count_chunks(args, layout.num_stages)
    why_no_activations = model_flags.why_no_activations(args, layout)
    spans = expert_spans(layout, replicas)
    placement = place_workers(replicas, num_chunks=num_chunks, num_rings=config.num_rings, expert_spans=spans)
    placement = dataclasses.replace(placement, num_frozen=_num_frozen(args, config, layout, placement, fitted))
    takes_costs = (takes_all_costs or config.split_backward) and not config.layerwise_disaggregated
    return Run(
        config=config,
        layout=layout,
        placement=placement,
        rules=resolve.transport_rules(config, tensor_bytes, is_sharded=args.sequence_parallel),
        schedule_options=resolve.read_schedule_options(
            config, layout.num_stages, tensor_bytes, num_chunks=num_chunks, fixed=placement if takes_costs else None
        ),
        shape=shape,
        itemsize_bytes=itemsize_bytes,
        is_sharded=args.sequence_parallel,
        global_batch_size=args.global_batch_size,
        num_microbatches=_num_microbatches(args, replicas),
        memory=_memory(args, config, layout, num_chunks, fitted),
        about_activations=why_no_activations or model_flags.about_activations(args),
        fitted=fitted,
    )


def _read_sizes(args: argparse.Namespace) -> tuple[VtpConfig, Fitted | None]:
    """Read the plugin's flags with TP sizes, or fit these to ``--have``."""
    if args.have is not None and args.vtp_size_list is None:
        args = with_values(args, vtp_size_list="auto")
    if args.have is not None:
        return fit_to_cards(args, resolve.read_flags(allowing_split(args), VtpConfig()))
    config = resolve.read_flags(args, VtpConfig())
    if args.card_memory is not None and not is_page(getattr(args, "output", None)):
        raise ConfigError(
            f"{CARD_MEMORY} is for --have, and for a page (--output FILE.html); give one of them, or neither"
        )
    if config.size_list is None and args.tensor_model_parallel_size:
        # Megatron's own words for stages of one size.
        stages = args.pipeline_model_parallel_size or 1
        config = dataclasses.replace(config, size_list=(args.tensor_model_parallel_size,) * stages)
    if config.size_list is None:
        raise ConfigError("--vtp-size-list is missing; give the tensor-parallel size of every stage, such as 1,4,4")
    if not isinstance(config.size_list, tuple):
        raise ConfigError("--vtp-size-list auto needs a running launcher; write the sizes, or say --have 8,6,8")
    return config, None


def check_unknown(argv: Sequence[str], *, are_ignored: bool = True) -> None:
    """Print a note about unknown flags, and refuse those that were meant to change something.

    Args:
        argv: words of unknown flags.
        are_ignored: whether the command ignores them, so that there is something to note.

    Raises:
        ConfigError: a word looks like a flag that matters, or comes before any flag.
    """
    if argv and not argv[0].startswith("-"):
        raise ConfigError(f"{argv[0]!r} belongs to no flag; give the flags that follow the script in a run")
    flags = [word.partition("=")[0] for word in argv if word.startswith("--")]
    for flag in flags:
        hint = question(flag, known_flags())
        if hint or flag.startswith("--vtp"):
            raise ConfigError(f"{flag} is unknown{hint or f'; `{own_command()} run --help-all` lists the flags'}")
    flags = [flag for flag in flags if flag not in judged_flags(argv)]
    if flags and are_ignored:
        note = f"vtp_plugin: {len(flags)} flag(s) change nothing here: {', '.join(flags)}"
        print(textwrap.shorten(note, 160, placeholder=" ..."), file=sys.stderr)


def known_flags() -> tuple[str, ...]:
    """List the flags of all commands that read a run's flags."""
    return *(flag.name for flag in (*resolve.VTP_FLAGS, *RUN_FLAGS, *MODEL_FLAGS)), *_OTHERS, *_OF_A_FIT


def _layout(args: argparse.Namespace, config: VtpConfig, sizes: tuple[int, ...]) -> PipelineLayout:
    cp = args.context_parallel_size or 1
    cp_sizes = resolve.choose_cp_sizes(config.cp_list, cp, num_stages=len(sizes))
    dp_sizes = config.dp_list or (config.data_parallel_size or 1,) * len(sizes)
    least = sum(map(math.prod, zip(sizes, cp_sizes, dp_sizes, strict=True)))
    return resolve.plan_layout(
        config,
        world_size=least if args.world_size is None else args.world_size,
        pipeline_size=args.pipeline_model_parallel_size or 1,
        tensor_size=args.tensor_model_parallel_size,
        cp=cp,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        ep=args.expert_model_parallel_size or 1,
        etp=args.expert_tensor_parallel_size,
    )


def _chunks(
    args: argparse.Namespace, config: VtpConfig, layout: PipelineLayout, num_chunks: int, fitted: Fitted | None
) -> tuple[tuple[Chunk, ...], ...]:
    """Share out the layers over the chunks of every stage, where flags or a fit say them."""
    is_u_shaped = config.layerwise_disaggregated
    parts = config.num_layer_list if is_u_shaped else None
    layers = None if fitted is None or is_u_shaped else fitted.candidate.layers
    return model_flags.read_chunks(args, layout, num_chunks, parts, layers)


def _num_frozen(
    args: argparse.Namespace, config: VtpConfig, layout: PipelineLayout, placement: Placement, fitted: Fitted | None
) -> int:
    """Count the virtual stages before the first adapters, as a run does; 0 where it has none, or nothing is known."""
    has_parts = config.num_layer_list is not None
    is_known = has_parts if config.layerwise_disaggregated else model_flags.says_layers(args)
    if config.lora is None or not (config.has_planned_schedule and is_known):
        return 0
    chunks = _chunks(args, config, layout, placement.num_vstages // placement.num_stages, fitted)
    along = (chunks[stage][placement.chunk(vstage)] for vstage, stage in enumerate(placement.stages))
    return config.lora.num_frozen([len(chunk.layers) for chunk in along])


def _memory(
    args: argparse.Namespace, config: VtpConfig, layout: PipelineLayout, num_chunks: int, fitted: Fitted | None
) -> tuple[Footprint, ...] | str:
    lacks_parts = config.layerwise_disaggregated and config.num_layer_list is None
    if reason := model_flags.why_unknown(args, lacks_parts=lacks_parts):
        return reason
    if config.encoder_layer_list is not None:
        return "the sizes of the encoder are not among the flags"
    chunks = _chunks(args, config, layout, num_chunks, fitted)
    return model_flags.read_footprints(args, layout, chunks, resolve.replica_map(config, layout))


def _check(args: argparse.Namespace, config: VtpConfig, layout: PipelineLayout, replicas: ReplicaMap) -> None:
    """Refuse what a run would refuse at its start."""
    replicas.check(resolve.stage_boundaries(config, layout.num_stages))
    if config.num_layer_list is not None:
        check_layers(
            config.num_layer_list,
            num_stages=layout.num_stages,
            num_layers=args.num_layers or None,
            option="--num-layer-list",
            least_on_edge=config.least_on_edge,
        )
    if config.encoder_layer_list is not None:
        check_two_rings(config.encoder_layer_list, layout.cp_sizes, is_split=replicas.is_split)
    context = resolve.option_context(config, layout)
    refuse(check_run(with_judged(args, args.unknown, context), context, replicas))


def read_tensor(args: argparse.Namespace) -> tuple[tuple[int, int, int] | None, int]:
    """Return S, B and H of the tensors that cross, None if a flag is missing, and the bytes of one number.

    Raises:
        ConfigError: a length is none.
    """
    given = (args.seq_length, args.micro_batch_size, args.hidden_size)
    if any(number is not None and number < 1 for number in given):
        raise ConfigError("--seq-length, --micro-batch-size and --hidden-size must be at least 1")
    return given if all(given) else None, 2 if args.fp16 or args.bf16 else 4


def _num_microbatches(args: argparse.Namespace, replicas: ReplicaMap) -> int | None:
    """Count the microbatches that one team of replicas runs in a step; None if a flag is missing."""
    batch, size = args.global_batch_size, args.micro_batch_size
    if not batch or not size:
        return None
    parts = size * (max(replicas.dp_sizes) if replicas.is_split else replicas.num_teams)
    refuse(replicas.check_equal_batch(batch, size))
    return batch // parts
