"""H1 and H2: the plugin's flags, and Megatron's argument checks with the own stage's size, on all ranks together."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from vtp_plugin.config import (
    merge,
    parse_cost_words,
    parse_cp_list,
    parse_dp_list,
    parse_in_flight,
    parse_sites,
    parse_size_list,
)
from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.u_layers import check_layers, layout_of, parse_layer_list
from vtp_plugin.options import (
    OptionContext,
    check_batches,
    check_options,
    check_sizes,
    describe_batches,
    own_batches,
    shared_arguments,
)
from vtp_plugin.patching import PatchRecord
from vtp_plugin.runtime.startup import open_store
from vtp_plugin.session import Session

# The schedule has an order of its own, and what tells packed samples apart does not cross to the cloud.
_NOT_U_SHAPED = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "mtp_num_layers",
    "reset_attention_mask",
    "dataloader_inter_document_masking",
    "sft",
    "full_validation",
)


def records(session: Session, activate: Callable[[], None]) -> tuple[PatchRecord, ...]:
    """Give the records of this module.

    Args:
        session: the applied plugin.
        activate: applies the patches that need the list; called once the list is known.
    """
    return (
        PatchRecord(
            id="H1",
            target="megatron.training.arguments:parse_args",
            build=functools.partial(_parse, session),
            why="it takes a provider of extra arguments, so no function that declares Megatron's own is touched",
            versions=">=0.19,<0.20",
            remove_when="Megatron has the option",
            optional=True,
        ),
        PatchRecord(
            id="H2",
            target="megatron.training.arguments:validate_args",
            build=functools.partial(_validate, session, activate),
            why="it derives data parallelism from one tensor-parallel size; each rank lets it see the world that it "
            "would have if all stages were like its own",
            versions=">=0.19,<0.20",
            remove_when="with H1",
            optional=True,
        ),
    )


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


def _parse(session: Session, original: Callable[..., argparse.Namespace]) -> Callable[..., argparse.Namespace]:
    @functools.wraps(original)
    def parse_args(
        extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
        ignore_unknown_args: bool = False,
    ) -> argparse.Namespace:
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            # Unset, to tell "not given" from 1.
            parser.set_defaults(tensor_model_parallel_size=None)
            return add_vtp_arguments(parser)

        return original(provider, ignore_unknown_args)

    return parse_args


def _validate(session: Session, activate: Callable[[], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> Any:
        def prepare() -> dict[str, object]:
            _read_flags(session, args)
            if args.num_layer_list is not None and not session.config.layerwise_disaggregated:
                raise ConfigError("--num-layer-list is for --layerwise-disaggregated-training; give both or none")
            platform = session.choose_platform()
            if platform.name == "cpu":
                args.distributed_backend = platform.backend
            if session.config.size_list is None:
                for flag, sizes in (
                    ("--vtp-cp-list", session.config.cp_list),
                    ("--vtp-dp-list", session.config.dp_list),
                ):
                    if sizes:
                        ones = ",".join("1" for _ in sizes)
                        shown = ",".join(map(str, sizes))
                        raise ConfigError(f"{flag} {shown} needs stages: give --vtp-size-list, such as {ones}")
                if session.config.has_planned_schedule:
                    raise ConfigError("planned schedules need stages: give --vtp-size-list, such as 1,1")
                activate()
                shared = shared_arguments(vars(args), has_edge=False)
                return {**shared, "validated": _call(original, args, defaults, args.world_size)}
            session.resolve_auto(args.context_parallel_size)
            session.plan(
                world_size=args.world_size,
                pipeline_size=args.pipeline_model_parallel_size,
                tensor_size=args.tensor_model_parallel_size,
                cp=args.context_parallel_size,
                order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            )
            _check_site(session, args)
            session.open_audit(args.rank)
            if session.config.layerwise_disaggregated:
                _set_u_shape(session, args)
            shared = shared_arguments(vars(args), has_edge=session.config.layerwise_disaggregated)
            statement = {**session.statement(), **shared}
            _set_own_sizes(session, args)
            activate()
            layout = session.layout
            assert layout is not None
            _call(original, args, defaults, layout.uniform_world_size(args.rank))
            return statement

        if args.world_size == 1:
            prepare()
        else:
            timeout_s = args.vtp_timeout_s or session.config.timeout_s
            store = open_store(args.rank, args.world_size, timeout_s)
            session.ranks.agree(store, prepare, rank=args.rank, world_size=args.world_size, timeout_s=timeout_s)
        if session.is_active:
            from vtp_plugin.patches.training.checkpointing import require_common_folder

            require_common_folder(session, args)
        if args.rank == 0 and session.layout is not None:
            print(session.describe(), flush=True)
            if not session.replicas.is_equal:
                # Rank 0 is on the first stage.
                size = args.micro_batch_size // session.replicas.micro_batch(0, 1)
                print(describe_batches(args.global_batch_size, size, session.replicas), flush=True)
            print(_vocabulary_hint(session, args), flush=True)
        return args

    return validate_args


def _call(original: Callable[..., Any], args: argparse.Namespace, defaults: Any, seen_world_size: int) -> str:
    """Run Megatron's checks while they see another world size."""
    if args.tensor_model_parallel_size is None:
        args.tensor_model_parallel_size = 1
    world_size, args.world_size = args.world_size, seen_world_size
    try:
        original(args, {} if defaults is None else defaults)
    finally:
        args.world_size = world_size
    return "yes"


def _read_flags(session: Session, args: argparse.Namespace) -> None:
    """Add the flags to what ``apply()`` was told."""
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
    told = session.config
    session.config = merge(told, flags)
    if session.is_activated and session.config.layerwise_disaggregated and not told.layerwise_disaggregated:
        raise ConfigError(
            "apply() was told the list of sizes, the command line says --layerwise-disaggregated-training; give both "
            "in one place"
        )


def _check_site(session: Session, args: argparse.Namespace) -> None:
    """Refuse ranks on a machine of another site than their stage's: the launcher has numbered the machines otherwise.

    Raises:
        ConfigError: the site is unknown, or it is not the own stage's.
    """
    if args.vtp_site is None:
        return
    assert session.layout is not None
    sites = session.config.sites or ()
    if args.vtp_site not in sites:
        raise ConfigError(
            f"--vtp-site {args.vtp_site} is none of --vtp-sites {','.join(sites) or '(not given)'}; name the site of "
            "every stage there, and this machine's here"
        )
    stage = session.layout.stage_of(args.rank)
    if sites[stage] != args.vtp_site:
        raise ConfigError(
            f"stage {stage} belongs to site {sites[stage]}, but its rank {args.rank} runs on a machine of site "
            f"{args.vtp_site}; number the machines in the order of the stages, with a static rendezvous (--node-rank)"
        )


def _set_u_shape(session: Session, args: argparse.Namespace) -> None:
    """Translate the edge's two parts into a layout that Megatron knows: two chunks a stage, the cloud's second empty.

    Raises:
        ConfigError: the parts do not fit, or an option does not work with them.
    """
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    assert session.layout is not None
    for name in _NOT_U_SHAPED:
        if getattr(args, name, None):
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} does not work with --layerwise-disaggregated-training; leave it out")
    text, option = args.pipeline_model_parallel_layout, "--num-layer-list"
    if (args.num_layer_list is None) == (text is None):
        raise ConfigError(
            "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
            "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them"
        )
    if text is not None:
        option = "--pipeline-model-parallel-layout"
        parts = PipelineParallelLayerLayout.parse_str_to_list(text)
        if LayerType.embedding not in parts[0] or LayerType.loss not in parts[-1]:
            raise ConfigError(
                f"{option} {text!r}: the edge is stage 0 and holds the embedding and the loss; write E at the start of "
                "the first part and L at the end of the last one"
            )
        layers = tuple(part.count(LayerType.decoder) for part in parts)
    else:
        layers = parse_layer_list(args.num_layer_list)
    check_layers(layers, num_stages=session.layout.num_stages, num_layers=args.num_layers, option=option)
    args.pipeline_model_parallel_layout = layout_of(layers)


def _refuse_interleaving(session: Session, args: argparse.Namespace) -> None:
    """Refuse several chunks on stages of different data-parallel sizes.

    Raises:
        ConfigError: an option asks for them.
    """
    shown = ",".join(map(str, session.replicas.dp_sizes))
    for name in ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"):
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not work with --vtp-dp-list {shown}: no interleaved order "
                "is known for different data-parallel sizes; leave it out or use equal sizes"
            )


def _set_own_sizes(session: Session, args: argparse.Namespace) -> None:
    """Check Megatron's options against all stages, then let the arguments say the own stage's size.

    Raises:
        ConfigError: an option or a size of the model does not fit the list.
    """
    layout, platform = session.layout, session.platform
    assert layout is not None and platform is not None
    context = OptionContext(
        tp_sizes=layout.tp_sizes,
        cp_sizes=layout.cp_sizes,
        dp_sizes=layout.dp_sizes,
        num_virtual=args.num_virtual_stages_per_pipeline_rank or 1,
        forced=session.config.force or session.config.has_planned_schedule,
        device=platform.name,
    )
    if not session.replicas.is_equal:
        _refuse_interleaving(session, args)
        check_batches(args, session.replicas)
    problems = (*check_options(args, context), *check_sizes(args, context))
    if problems:
        raise ConfigError(" | ".join(problems))
    if args.hidden_size and args.seq_length and args.micro_batch_size:
        itemsize_bytes = 2 if args.fp16 or args.bf16 else 4
        rows = args.seq_length // max(layout.cp_sizes)
        session.tensor_bytes = rows * args.micro_batch_size * args.hidden_size * itemsize_bytes
    args.vtp_size_list = list(layout.tp_sizes)
    args.vtp_cp_list = list(layout.cp_sizes)
    args.vtp_dp_list = list(layout.dp_sizes)
    stage = layout.stage_of(args.rank)
    own = layout.stages[stage]
    if not session.replicas.is_equal:
        vars(args).update(own_batches(args, session.replicas, stage))
    args.tensor_model_parallel_size = own.tp
    args.context_parallel_size = own.cp
    args.pipeline_model_parallel_size = layout.num_stages


def _vocabulary_hint(session: Session, args: argparse.Namespace) -> str:
    """Say how a uniform run gets the same padded vocabulary, which enters the loss."""
    assert session.layout is not None
    multiple = args.make_vocab_size_divisible_by * session.layout.vocab_multiple()
    return (
        f"padded vocabulary: a multiple of {multiple}; a uniform run with tensor-parallel size 1 pads the same with "
        f"--make-vocab-size-divisible-by {multiple}"
    )
