"""`argument-checks`: Megatron's checks of arguments with this stage's sizes, on all ranks together.

`argument-checks/summary`: what the run is, behind what Megatron says of its world.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from vtp_plugin.checkpoint.hf.hf_model import take_settings
from vtp_plugin.config.resolve import check_without_stages, crossing_bytes, read_flags
from vtp_plugin.errors import LayoutError, VtpError, refuse
from vtp_plugin.host.patching import replaces
from vtp_plugin.host.rules.checks.batch import (
    check_site,
    describe_batches,
    final_batch,
    own_batches,
    packing_flag,
    shared_arguments,
)
from vtp_plugin.host.rules.checks.stage_layers import check_stage_layers
from vtp_plugin.host.rules.rule import EXPERT_RULES
from vtp_plugin.host.rules.run_checks import check_run
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.mindspeed import known_mm, multimodal
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.command_line import asks_for_stages
from vtp_plugin.patches.training.layers_of_stages import layers_of_stages, read_layers
from vtp_plugin.plan.layout.pipeline_layout import join_layers
from vtp_plugin.plan.model.lora import arguments_of
from vtp_plugin.runtime.health.meeting_store import open_store
from vtp_plugin.runtime.step.companion_tensors import packed_rows
from vtp_plugin.session import Session
from vtp_plugin.session.session import warn_of_options
from vtp_plugin.session.stage_comm_grid import agree_on_request, learn_site
from vtp_plugin.util import log
from vtp_plugin.util.undo import Name, UndoStack


@replaces("megatron.training.arguments:validate_args", id="argument-checks", when=Moment.COMMAND_LINE)
def _validate(
    session: Session,
    host: MegatronHost,
    activate: Callable[[], None],
    original: Callable[..., Any],
    args: argparse.Namespace,
    defaults: dict[str, Any] | None = None,
) -> Any:
    """Run `validate_args` on all ranks together, each with its stage's sizes, after the plugin's checks.

    Why: it derives data parallelism from one tensor-parallel size; each rank shows it the world that there would be if
    all stages were like this rank's.

    Remove when: with `vtp-flags`.
    """

    def check() -> Any:
        # No partial object: the engine would find the original in it and replace it there too.
        return original(args, {} if defaults is None else defaults)

    if not asks_for_stages(session, args):
        return _validate_uniform(session, host, activate, check, args)
    session.watch_failures()
    read = functools.partial(_read_flags, session, host, args)
    prepare = functools.partial(_prepare, session, host, activate, check, args)
    if args.world_size == 1:
        read()
        prepare()
    else:
        timeout_s = args.vtp_timeout_s or session.config.timeout_s
        store = open_store(args.rank, args.world_size, timeout_s)
        agree_on_request(session, store, read, rank=args.rank, world_size=args.world_size, timeout_s=timeout_s)
        session.ranks.agree("start-up check", prepare, timeout_s=timeout_s)
    session.learn(has_arguments=True)
    session.describe(args.rank, _format_layers(session, args))
    # Not at the top: they import Megatron's optimizer, and apply() imports this module before a script does.
    from vtp_plugin.patches.training.checkpointing import lock_folders, share_folder
    from vtp_plugin.patches.training.vocab_utils import note_vocabulary

    if session.is_active:
        share_folder(session, host, args)
    lock_folders(session, args)
    layout, replicas = session.planned.layout, session.planned.replicas
    if not replicas.is_equal:
        # The first stage's, so that all ranks write the same line.
        unit = replicas.micro_batch(layout.stage_of(args.rank), 1)
        log.info(describe_batches(final_batch(args), args.micro_batch_size // unit, replicas))
    note_vocabulary(session, args)
    warn_of_options(session.planned, args, version=host.version, rank=args.rank)
    return args


@replaces("megatron.training.arguments:_print_args", id="argument-checks/summary", when=Moment.LIST)
def _print(
    session: Session, original: Callable[..., None], title: str, args: argparse.Namespace, *rest: Any, **options: Any
) -> None:
    """Run `_print_args` behind the summary of the run.

    Why: Megatron has just said the sizes of its world, those of rank 0's stage, and prints hundreds of lines next:
    between them stands what the run is.

    Remove when: with `argument-checks`.
    """
    if session.is_planned:
        session.describe(args.rank, _format_layers(session, args), is_behind_banner=True)
    original(title, args, *rest, **options)


def _format_layers(session: Session, args: argparse.Namespace) -> list[str]:
    return [*map(join_layers, layers_of_stages(args, session.planned.layout.num_stages))]


def _prepare(
    session: Session,
    host: MegatronHost,
    activate: Callable[[], None],
    check: Callable[[], Any],
    args: argparse.Namespace,
) -> dict[str, object]:
    """Plan the run, run all checks, Megatron's last, and return what must be equal on all ranks.

    Args:
        session: the applied plugin.
        host: the family of the Megatron that runs.
        activate: applies the patches that need the list.
        check: Megatron's checks.
        args: Megatron's arguments; they say this stage's sizes afterwards.

    Raises:
        ConfigError: the arguments do not fit the list.
    """
    for folder in (getattr(args, "pretrained_checkpoint", None), args.load):  # as Megatron, which takes both
        if args.use_checkpoint_args and folder is not None:
            take_settings(folder, args)
    _choose_backend(session, args)
    session.open_log()
    session.resolve_auto(args.context_parallel_size)
    session.plan(
        world_size=args.world_size,
        pipeline_size=args.pipeline_model_parallel_size,
        tensor_size=args.tensor_model_parallel_size,
        cp=args.context_parallel_size,
        order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size,
    )
    config, layout = session.config, session.planned.layout
    learn_site(session, args.rank)
    refuse(check_site(args.vtp_site, args.rank, layout, config.sites or ()), LayoutError)
    session.learn(note=session.edge_seed.find(session.planned, args.rank, (args.load, args.pretrained_checkpoint)))
    session.start.open_audit(config, args.rank)
    session.start.open_records(session.planned, args.rank, session.ranks, session.recorder)
    layers: tuple[int, ...] = ()
    written_layers: AbstractContextManager[None] = contextlib.nullcontext()
    has_lists = host.mindspeed is not None and multimodal.is_multimodal(args)
    if has_lists and session.planned.is_active:
        multimodal.check(session, args)
    if config.layerwise_disaggregated:
        layers = read_layers(session, host, args, has_lists=has_lists)
        if has_lists:
            for companion in multimodal.companions(args):
                session.learn(companion=companion)
        else:
            written_layers = host.written_layers(args, layers, config.num_rings)
        if host.mindspeed is not None:
            # MindSpeed-LLM has flags of these names, and would act on them.
            args.layerwise_disaggregated_training, args.num_layer_list = False, None
    shared = shared_arguments(vars(args), has_edge=config.layerwise_disaggregated)
    if has_lists:
        shared["--mm"] = multimodal.stated_model(args)  # it is an object of no value
    statement = {**session.planned.statement(), **shared}
    _set_own_sizes(session, host, args)
    activate()
    if has_lists and config.layerwise_disaggregated:
        multimodal.write_chunks(args)
    # Megatron divides the world by this stage's sizes, so it gets the world of stages that are all like this one.
    with UndoStack().during(Name(args, "world_size"), layout.uniform_world_size(args.rank)), written_layers:
        check()
    if config.lora is not None:
        # Of a U along the model; of others chunk by chunk.
        chunks = zip(*layers_of_stages(args, layout.num_stages), strict=True)
        session.learn(layers=layers or tuple(chain.from_iterable(chunks)))
    return statement


def _choose_backend(session: Session, args: argparse.Namespace) -> None:
    """On CPU, let Megatron open its groups on the platform's backend: it only knows those of accelerators."""
    platform = session.choose_platform()
    if platform.name == "cpu":
        args.distributed_backend = platform.backend


def _validate_uniform(
    session: Session,
    host: MegatronHost,
    activate: Callable[[], None],
    check: Callable[[], Any],
    args: argparse.Namespace,
) -> Any:
    """Leave a run without a list to Megatron: no store, no thread, no exception hook, no line in the log.

    If only some ranks have a list, they do not meet the others here. The ranks with a list wait at the start-up check,
    and end within their timeout with a line that names the missing ones. The others wait when torch starts, and end
    when the launcher ends them or the store is lost. Such a mixture never runs a step.
    """
    try:
        _read_flags(session, host, args)
        refuse(check_without_stages(session.config), LayoutError)
        _choose_backend(session, args)
        activate()
    except VtpError:
        session.watch_failures()
        raise
    return check()


def _read_flags(session: Session, host: MegatronHost, args: argparse.Namespace) -> None:
    """Add the flags to what ``apply()`` was given."""
    given = session.config
    has_lists = host.mindspeed is not None and multimodal.is_multimodal(args) and asks_for_stages(session, args)
    if has_lists:
        refuse(known_mm.problems_of_versions(host.version))
        multimodal.read_model(args, is_u_shaped=given.layerwise_disaggregated)
    session.ask(read_flags(args, given, host.declared_flags))
    sizes = session.config.size_list
    if has_lists and session.config.layerwise_disaggregated and isinstance(sizes, tuple):
        # Else the plan would name a flag that nobody has given.
        refuse(multimodal.problems_of_rows(args, len(sizes)), LayoutError)
    # With a list in apply() the patches are applied already, and those of the U-shape are not among them.
    if session.applied.has_list and session.config.lora is not None and given.lora is None:
        raise LayoutError(
            "apply() was given the list of sizes, the command line says --vtp-lora-rank; give both in one place"
        )
    if session.applied.has_list and session.config.layerwise_disaggregated and not given.layerwise_disaggregated:
        raise LayoutError(
            "apply() was given the list of sizes, the command line says --layerwise-disaggregated-training; give both "
            "in one place"
        )


def _set_own_sizes(session: Session, host: MegatronHost, args: argparse.Namespace) -> None:
    """Check Megatron's options against all stages, then set the arguments to this stage's sizes.

    Raises:
        ConfigError: an option or a size of the model does not fit the list.
    """
    layout, replicas = session.planned.layout, session.planned.replicas
    context = dataclasses.replace(session.planned.option_context, version=host.version)
    refuse(
        (
            *check_run(args, context, replicas),
            *check_stage_layers(args, context),
            *host.problems_of_saving(args, device=session.planned.platform.name),
            *(host.refusals(EXPERT_RULES, args, context) if args.num_experts else ()),
        )
    )
    session.learn(
        log_interval_steps=args.log_interval,
        is_sharded=bool(args.sequence_parallel),
        tensor_bytes=crossing_bytes(args, layout.cp_sizes),
    )
    if packing_flag(args):
        session.learn(has_packed_rows=True)
        if session.config.layerwise_disaggregated:
            session.learn(companion=packed_rows(args.seq_length))
    stage = layout.stage_of(args.rank)
    if not replicas.is_equal:
        vars(args).update(own_batches(args, replicas, stage))
    vars(args).update(
        **({} if session.config.lora is None else arguments_of(session.config.lora)),
        # The lists are stored with a checkpoint, whose reader compares them (`checkpoint-layout`).
        vtp_size_list=list(layout.tp_sizes),
        vtp_cp_list=list(layout.cp_sizes),
        vtp_dp_list=list(layout.dp_sizes),
        vtp_ep_list=list(layout.ep_sizes),
        vtp_etp_list=list(layout.etp_sizes),
        tensor_model_parallel_size=layout.tp_sizes[stage],
        context_parallel_size=layout.cp_sizes[stage],
        pipeline_model_parallel_size=layout.num_stages,
    )
    if args.num_experts:
        expert = layout.experts[stage]
        vars(args).update(expert_model_parallel_size=expert.ep, expert_tensor_parallel_size=expert.tp)
