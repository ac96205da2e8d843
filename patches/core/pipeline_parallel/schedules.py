"""H10: planned schedules: the plugin's executor instead of Megatron's forward-backward functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from vtp_plugin.errors import refuse
from vtp_plugin.options.table.check import check_step
from vtp_plugin.patches.core.pipeline_parallel.p2p_communication import tensor_format, tensor_formats
from vtp_plugin.patches.core.timers import waiting_for_computes
from vtp_plugin.patches.hosts import MegatronHost
from vtp_plugin.patching import PatchRecord, Record, Writes
from vtp_plugin.patching.record import wrap_with
from vtp_plugin.runtime.step.communicator import PipelineCommunicator
from vtp_plugin.runtime.step.executor import Compute, Inputs
from vtp_plugin.runtime.step.grad_sync import GradSync
from vtp_plugin.runtime.step.links import Link, LinkForm, LinkId, bind_links
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.wire.tensor_format import TensorFormat
from vtp_plugin.schedule.order.actions import Action
from vtp_plugin.schedule.order.placement import Placement
from vtp_plugin.schedule.order.schedule import Schedule
from vtp_plugin.session import Session

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


def records(session: Session, host: MegatronHost) -> tuple[Record, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="H10",
            target="megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
            build=wrap_with(_choose, session, host, session.writes),
            why="training and evaluation both ask here for the function that runs a step; Megatron's own have no "
            "U-shape, and their 1F1B posts a receive only when it waits for it",
            remove_when="Megatron's schedules take an order of actions",
            aliases=(
                "megatron.core.pipeline_parallel:get_forward_backward_func",
                "megatron.training.training:get_forward_backward_func",
            ),
        ),
        PatchRecord(
            id="H12",
            target="megatron.core.pipeline_parallel.schedules:forward_step",
            build=wrap_with(_forward_step, session),
            why="it scales the losses of routers by this stage's numbers of microbatches and context-parallel ranks, "
            "but the gradients of all stages are averaged as those of the stage with the loss",
            remove_when="Megatron knows stages with different numbers of replicas",
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
    """Run `get_forward_backward_func`; for the run's own pipeline return the planned schedule, where there is one."""
    stock = original(*args, **kwargs)
    communicator = session.running.communicator if session.is_running else None
    if communicator is None or not host.is_whole_pipeline(*args, **kwargs):
        return stock
    if session.running.schedule_runner is None:
        return functools.partial(_run_stock, session, communicator, stock)
    return functools.partial(_run_planned_step, writes, session, host)


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
    """Run `forward_step`; other losses than the model's are scaled as on the stage with the loss."""
    if session.is_planned and (share := session.planned.gradient_share) != 1.0:
        # Megatron divides by this number, and multiplies by the context-parallel size of this stage.
        num_microbatches *= share
    return original(forward_step_func, data_iterator, model, num_microbatches, *args, **kwargs)


def _run_stock(
    session: Session,
    communicator: PipelineCommunicator,
    stock: Callable[..., list[Any]],
    *,
    model: Any,
    **arguments: Any,
) -> list[Any]:
    """Run one step by a function of Megatron; first the ranks compare what is to cross."""
    tensor_format(session, get_model_config(_chunks(model)[0]))
    communicator.start_step()
    return stock(model=model, **arguments)


def _run_planned_step(writes: Writes, *args: Any, **kwargs: Any) -> list[Any]:
    """Run one step as planned; Megatron's timers wait for what was received, not for what is to be."""
    with waiting_for_computes(writes):
        return forward_backward(*args, **kwargs)


def _chunks(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


@dataclass(kw_only=True)
class _Compute:
    """Forward and backward of one chunk by Megatron's functions, as the executor calls them."""

    host: MegatronHost
    config: Any
    chunks: list[Any]
    iterators: list[Any]
    schedule: Schedule
    sync: GradSync
    num_tokens: torch.Tensor
    forward_options: dict[str, Any]
    first_val_step: bool | None
    reports: list[Any] = field(default_factory=list[Any])

    def forward(self, action: Action, activation: Inputs) -> torch.Tensor:
        placement = self.schedule.placement
        chunk = placement.chunk(action.vstage)
        # Replicas take turns, and Megatron counts only the microbatches of this rank.
        microbatch = action.microbatch // placement.num_replicas[placement.stages[action.vstage]]
        self.sync.before_forward(chunk)
        self.host.enter_chunk(chunk)
        output, num_tokens = self.host.forward_step(
            chunk=chunk,
            num_chunks=len(self.chunks),
            data_iterator=self.iterators[chunk],
            model=self.chunks[chunk],
            input_tensor=activation,
            forward_data_store=self.reports,
            config=self.config,
            is_first_microbatch=schedules.check_first_val_step(
                self.first_val_step, self.schedule.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            is_last_stage=action.vstage == placement.num_vstages - 1,
            **self.forward_options,
        )
        self.num_tokens += num_tokens
        return output

    def backward(
        self,
        action: Action,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> Inputs:
        chunk = self.schedule.placement.chunk(action.vstage)
        with self.sync.backward(chunk, is_last=is_last):
            self.host.enter_chunk(chunk)
            rest = self.host.backward_arguments(self.chunks[chunk], self.config)
            return schedules.backward_step(activation, output, gradient, *rest)

    def release(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)


def forward_backward(
    session: Session,
    host: MegatronHost,
    *,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> list[Any]:
    """Run one step as planned; arguments and result as of what Megatron's ``get_forward_backward_func`` returns."""
    chunks = _chunks(model)
    config = get_model_config(chunks[0])
    arguments = SimpleNamespace(p2p_communicator=p2p_communicator, adjust_tensor_shapes_fn=adjust_tensor_shapes_fn)
    # Before anything else: the ranks compare the format here, so if one refuses its configuration, all stop.
    problems = check_step(arguments, session.planned.option_context)
    forms = _formats(session, chunks, problems)
    groups = host.default_groups() if pg_collection is None else pg_collection
    sizes = {"seq_length": seq_length, "micro_batch_size": micro_batch_size, "decoder_seq_length": decoder_seq_length}
    planned, runner = session.planned, session.running.require_schedule_runner()
    schedule = runner.schedule(
        num_microbatches,
        forward_only=forward_only,
        group_size=config.microbatch_group_size_per_vp_stage,
        batch=num_microbatches * micro_batch_size * planned.replicas.dp_sizes[planned.own.stage],
    )
    link_forms = _link_forms(host, groups, chunks, forms, sizes, schedule.placement)
    links = bind_links(schedule.placement, session.running.channels, link_forms)
    compute = _Compute(
        host=host,
        config=config,
        chunks=chunks,
        iterators=runner.iterators(data_iterator),
        schedule=schedule,
        sync=GradSync(config, chunks, forward_only=forward_only, is_first_stage=planned.own.stage == 0),
        num_tokens=torch.zeros([], dtype=torch.int, device="cuda"),
        forward_options={
            "forward_step_func": forward_step_func,
            "num_microbatches": num_microbatches,
            "collect_non_loss_data": collect_non_loss_data,
        },
        first_val_step=first_val_step,
    )
    return run_planned(
        runner, schedule, links, compute, chunks=chunks, options=host.finalize_options(groups, force_all_reduce)
    )


class PlannedCompute(Compute, Protocol):
    """What a planned step computes on this rank, and what it notes."""

    config: Any
    sync: GradSync
    num_tokens: torch.Tensor
    reports: list[Any]


def run_planned(
    runner: ScheduleRunner,
    schedule: Schedule,
    links: Mapping[LinkId, Link],
    compute: PlannedCompute,
    *,
    chunks: list[Any],
    options: Mapping[str, Any],
) -> list[Any]:
    """Run one step as planned, and let Megatron finish the gradients.

    Args:
        runner: runs the schedule.
        schedule: of the step.
        links: of this rank.
        compute: by Megatron's functions.
        chunks: of this rank.
        options: of ``finalize_model_grads_func``, besides chunks and number of tokens.

    Returns:
        What the loss function reported.
    """
    config = compute.config
    with _timed(config):
        with compute.sync.step():
            runner.run(schedule, links, compute)
        if config.finalize_model_grads_func is not None and not schedule.forward_only:
            num_tokens = compute.num_tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, num_tokens, **options)
    return compute.reports


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


def _formats(session: Session, chunks: list[Any], problems: Sequence[str]) -> tuple[TensorFormat, ...]:
    """Read how tensors cross in every ring: chunk i sends into ring i, in the form that its configuration says."""
    num_rings = max(1, session.config.num_rings)
    if num_rings > 1:
        problems = (*problems, *_problems_of_chunks(chunks))
    return tensor_formats(session, [*map(get_model_config, chunks[:num_rings])], functools.partial(refuse, problems))


def _link_forms(
    host: MegatronHost,
    groups: Any,
    chunks: list[Any],
    forms: Sequence[TensorFormat],
    sizes: dict[str, Any],
    placement: Placement,
) -> list[LinkForm]:
    """Say what crosses, by the virtual stage whose output it is.

    Of two rings, the first carries the encoder's ``seq_length`` rows, the second the ``decoder_seq_length``, if it is
    given, as in Megatron's models of two stacks.
    """
    by_ring: list[LinkForm] = []
    for ring, form in enumerate(forms):
        own = sizes if ring == len(forms) - 1 else {**sizes, "decoder_seq_length": None}
        chunk = chunks[ring]
        shape = host.tensor_shape(groups=groups, config=get_model_config(chunk), model=chunk, **own)
        by_ring.append(LinkForm(form=form, shape=shape))
    return [by_ring[min(placement.chunk(v), len(forms) - 1)] for v in range(placement.num_vstages - 1)]


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Measure a step with Megatron's timer."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()
