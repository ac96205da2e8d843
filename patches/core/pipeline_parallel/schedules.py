"""`planned-schedule`: the plugin's executor instead of Megatron's forward-backward functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config

from vtp_plugin.errors import refuse
from vtp_plugin.host.patching import Writes, replaces
from vtp_plugin.host.rules.table.rows import check_step
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format, tensor_formats
from vtp_plugin.patches.core.pipeline_parallel.planned_step import StepCall, StepPlan, chunks_of, run_step
from vtp_plugin.patches.core.tensor_parallel.layers import layers_that_cannot_split
from vtp_plugin.patches.core.timers import waiting_for_computes
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.plan.schedule.make.make_schedule import ScheduleRequest, make_schedule
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.step.companion_tensors import checked
from vtp_plugin.runtime.step.executor import Inputs
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.stage_channels import OutputForm, bind_channels
from vtp_plugin.session import Pipeline, Session
from vtp_plugin.trace.stretches import Cause, Plan
from vtp_plugin.util import log
from vtp_plugin.util.undo import UndoStack

# What Megatron reads from the configuration of the first chunk, for all of them.
_COMMON = (
    "sequence_parallel",
    "pipeline_dtype",
    "variable_seq_lengths",
    "calculate_per_token_loss",
    "deallocate_pipeline_outputs",
    "batch_p2p_comm",
    "fp16",
    "bf16",
)


@replaces(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    id="planned-schedule",
    when=Moment.LIST,
    aliases=(
        "megatron.core.pipeline_parallel:get_forward_backward_func",
        "megatron.training.training:get_forward_backward_func",
    ),
)
def _choose(
    session: Session,
    host: MegatronHost,
    writes: Writes,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Callable[..., list[Any]]:
    """Run `get_forward_backward_func`; for the run's own pipeline return the planned schedule, where there is one.

    Why: training and evaluation both ask here for the function that runs a step; Megatron's own have no U-shape, and
    their 1F1B posts a receive only when it waits for it.

    Remove when: Megatron's schedules take an order of actions.
    """
    stock = original(*args, **kwargs)
    own = session.pipelines.own
    if own is None or not host.is_whole_pipeline(*args, **kwargs):
        return stock
    if own.communicator is None:
        step = functools.partial(_run_untouched, own, stock)
    elif own.schedule_runner is None:
        step = functools.partial(_run_stock, session, stock)
    else:
        step = functools.partial(_run_planned_step, writes, PipelineBackend(session=session, host=host))
    return functools.partial(_run_passing, session, step)


def microbatches_for_auxiliary_losses(session: Session, num_microbatches: float) -> float:
    """Return the number by which Megatron shall divide other losses than the model's: of routers, of prediction.

    Its `forward_step` divides them by this stage's microbatches, and multiplies those of routers by its
    context-parallel size. But the gradients of all stages are averaged as those of the stage with the loss, so they
    shall weigh as there: microbatches count `gradient_share` times.

    Args:
        session: session of this rank.
        num_microbatches: microbatches of this stage.
    """
    own = session.pipelines.own
    if own is not None and (share := own.gradient_share) != 1.0:
        return num_microbatches * share
    return num_microbatches


@replaces("megatron.core.pipeline_parallel.schedules:forward_step", id="auxiliary-loss-scale", when=Moment.LIST)
def _forward_step(
    session: Session,
    original: Callable[..., Any],
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run `forward_step`; other losses than the model's are scaled as on the stage with the loss.

    Why: it scales the losses of routers by this stage's numbers of microbatches and context-parallel ranks, but the
    gradients of all stages are averaged as those of the stage with the loss; and a trace tells the loss function, which
    may wait for other replicas, from what the stage computes.

    Remove when: Megatron knows stages with different numbers of replicas.

    A recorder that is on is told what the script's loss function takes.
    """
    num_microbatches = microbatches_for_auxiliary_losses(session, num_microbatches)
    if session.recorder.is_on:
        forward_step_func = _with_noted_loss(forward_step_func, session.recorder)
    return original(forward_step_func, data_iterator, model, num_microbatches, *args, **kwargs)


def _with_noted_loss(forward_step_func: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Note what the loss function takes that a forward returns beside its output, if it returns one."""

    @functools.wraps(forward_step_func)
    def forward(*args: Any, **kwargs: Any) -> tuple[Any, Callable[..., Any] | None]:
        output, loss_func = forward_step_func(*args, **kwargs)
        if loss_func is None:
            return output, None

        def noted(*values: Any, **options: Any) -> Any:
            with recorder.span(Cause.LOSS):
                return loss_func(*values, **options)

        return output, noted

    return forward


def _run_passing(session: Session, step: Callable[..., list[Any]], *args: Any, **kwargs: Any) -> list[Any]:
    """Run one step; a rank that ends meanwhile, or has run fewer, leaves the others alone."""
    with session.ranks.passing():
        return step(*args, **kwargs)


def _run_untouched(pipeline: Pipeline, stock: Callable[..., Any], *, model: Any, **arguments: Any) -> list[Any]:
    """Run one step without the plugin's channels; warn once where Megatron's own mistake what crosses."""
    chunks, num_stages = chunks_of(model), len(pipeline.plan.layout.tp_sizes)
    if num_stages == 2 and len(chunks) > 1 and not arguments.get("forward_only", False):
        config = get_model_config(chunks[0])
        is_varying = config.variable_seq_lengths or getattr(config, "mtp_standalone", False)
        if is_varying and not config.overlap_p2p_comm and not pipeline.is_warned:
            pipeline.is_warned = True
            log.warning(
                f"variable lengths, {len(chunks)} chunks on each of 2 stages of one size, overlap_p2p_comm=False; "
                "Megatron mistakes the shapes that cross both ways for each other: wrong shapes or endless waiting "
                "unless all are equal; set overlap_p2p_comm=True and batch_p2p_comm=False, or give --vtp-force"
            )
    return stock(model=model, **arguments)


def _run_stock(
    session: Session,
    stock: Callable[..., list[Any]],
    *,
    model: Any,
    **arguments: Any,
) -> list[Any]:
    """Run one step by a function of Megatron; first the ranks compare what is to cross."""
    pipeline = session.running
    if not arguments.get("forward_only", False):
        session.begin_step()
        if session.start.tracing is not None:
            group_size = get_model_config(chunks_of(model)[0]).microbatch_group_size_per_vp_stage
            reason = arguments["num_microbatches"], group_size
            session.start.tracing.note_plan(reason, lambda: _stock_plan(pipeline, *reason))
    tensor_format(session, pipeline, get_model_config(chunks_of(model)[0]))
    pipeline.start_step()
    with _told_by_timers(session, model):
        return stock(model=model, **_with_checked_batches(session, arguments))


@contextlib.contextmanager
def _told_by_timers(session: Session, model: Any) -> Iterator[None]:
    """Give a model without timers some, while somebody listens: they say when it computes (`traced-timers`)."""
    undo = UndoStack()
    try:
        for config in map(get_model_config, chunks_of(model)):
            if session.recorder.is_on and config.timers is None:
                undo.set(config, "timers", Timers(0, "max"))
        yield
    finally:
        undo.undo()


def _run_planned_step(writes: Writes, backend: PipelineBackend, **arguments: Any) -> list[Any]:
    """Run one step as planned; Megatron's timers wait for what was received, not for what is to be."""
    if not arguments.get("forward_only", False):
        backend.session.begin_step()
    with waiting_for_computes(writes):
        return run_step(backend, **_with_checked_batches(backend.session, arguments))


def _stock_plan(pipeline: Pipeline, num_microbatches: int, group_size: int | None) -> Plan:
    """Make the order in which a function of Megatron computes; it knows no costs."""
    request = ScheduleRequest(
        placement=pipeline.plan.placement, num_microbatches=num_microbatches, group_size=group_size
    )
    return Plan(schedule=make_schedule(request)[0], costs=None)


def _with_checked_batches(session: Session, arguments: dict[str, Any]) -> dict[str, Any]:
    """Let every batch that a forward reads be checked, where something was learnt about batches."""
    check = session.planned.check_batch
    if check is None:
        return arguments
    return {**arguments, "data_iterator": checked(arguments["data_iterator"], check)}


@dataclass(frozen=True, kw_only=True)
class _ChunkPasses:
    """A forward and a backward of this rank's chunks, which take and give one tensor each."""

    host: MegatronHost
    chunks: list[Any]
    config: Any

    def forward(self, *, chunk: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.host.enter_chunk(chunk)
        return self.host.forward_step(chunk=chunk, num_chunks=len(self.chunks), **options)

    def backward(
        self,
        chunk: int,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last_stage: bool,
    ) -> Inputs:
        self.host.enter_chunk(chunk)
        rest = self.host.backward_arguments(self.chunks[chunk], self.config)
        return schedules.backward_step(activation, output, gradient, *rest)


@dataclass(frozen=True, kw_only=True)
class PipelineBackend:
    """Planned steps over the run's own pipeline.

    Attributes:
        session: the applied plugin.
        host: the family of the Megatron that runs.
    """

    session: Session
    host: MegatronHost

    @property
    def pipeline(self) -> Pipeline:
        """The run's own, of this start: a script may keep its step function for the next one."""
        return self.session.running

    @property
    def runner(self) -> ScheduleRunner:
        """Runs the schedules."""
        return self.pipeline.require_schedule_runner()

    def plan(self, call: StepCall) -> StepPlan:
        """Plan a step, once all ranks know that their tensors fit together.

        Raises:
            ConfigError: they do not, or there is no such order.
        """
        pipeline, host, config, chunks = self.pipeline, self.host, call.config, call.chunks
        forms = self._formats(call)
        groups = host.default_groups() if call.pg_collection is None else call.pg_collection
        schedule = self.runner.schedule(
            call.num_microbatches,
            forward_only=call.forward_only,
            group_size=config.microbatch_group_size_per_vp_stage,
            batch=call.num_microbatches * call.micro_batch_size * pipeline.plan.replicas.dp_sizes[pipeline.stage],
        )
        if self.session.start.tracing is not None and not call.forward_only:
            costs = self.runner.costs
            self.session.start.tracing.note_plan((schedule, costs), lambda: Plan(schedule=schedule, costs=costs))
        output_forms = _output_forms(host, groups, call, forms, schedule.placement)
        return StepPlan(
            schedule=schedule,
            channels=bind_channels(schedule.placement, pipeline.channels, output_forms),
            passes=_ChunkPasses(host=host, chunks=chunks, config=config),
            finalize_options=host.finalize_options(groups, call.force_all_reduce),
        )

    def _formats(self, call: StepCall) -> tuple[TensorFormat, ...]:
        """Read how tensors cross in every ring: chunk i sends into ring i, in the form that its configuration says."""
        context, chunks = self.pipeline.plan.context, call.chunks
        num_rings = max(1, context.num_rings)
        problems = check_step(call, context)
        if num_rings > 1:
            problems = (*problems, *_problems_of_chunks(chunks))
        if context.has_split_backward and self.pipeline.form is None:  # in the first step
            problems = (*problems, *layers_that_cannot_split(chunks))
        configs = [*map(get_model_config, chunks[:num_rings])]
        return tensor_formats(self.session, self.pipeline, configs, functools.partial(refuse, problems))


def _problems_of_chunks(chunks: list[Any]) -> Iterator[str]:
    """Say what differs between the configurations of chunks, where Megatron reads that of the first one for all."""
    first, *others = map(get_model_config, chunks)
    for number, config in enumerate(others, 1):
        for name in _COMMON:
            if (mine := getattr(first, name, None)) != (other := getattr(config, name, None)):
                yield (
                    f"the configurations of model chunks 0 and {number} have {name}={mine} and {other}; give the "
                    "encoder and the language model the same"
                )


def _output_forms(
    host: MegatronHost,
    groups: Any,
    call: StepCall,
    forms: Sequence[TensorFormat],
    placement: Placement,
) -> list[OutputForm]:
    """Say what crosses, by the virtual stage whose output it is.

    Of two rings, the first carries the encoder's ``seq_length`` rows, the second the ``decoder_seq_length``, if it is
    given, as in Megatron's models of two stacks.
    """
    by_ring: list[OutputForm] = []
    for ring, form in enumerate(forms):
        own = call.sizes if ring == len(forms) - 1 else {**call.sizes, "decoder_seq_length": None}
        chunk = call.chunks[ring]
        shape = host.tensor_shape(groups=groups, config=get_model_config(chunk), model=chunk, **own)
        by_ring.append(OutputForm(form=form, shape=shape))
    return [by_ring[min(placement.chunk(v), len(forms) - 1)] for v in range(placement.num_vstages - 1)]
