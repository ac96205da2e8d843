"""One planned step by Megatron's functions: of the run's own pipeline, or of several modules as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.utils import get_model_config
from torch.nn.utils.parametrize import is_parametrized

from vtp_plugin.plan.schedule.order.actions import Action, Op, Schedule
from vtp_plugin.runtime.step.executor import Inputs
from vtp_plugin.runtime.step.schedule_runner import ScheduleRunner
from vtp_plugin.runtime.step.stage_channels import CrossingId, StageChannel
from vtp_plugin.runtime.step.weight_gradients import GradSync, WeightGradients


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """Arguments of what Megatron's ``get_forward_backward_func`` returns."""

    forward_step_func: Callable[..., Any]
    data_iterator: Any
    model: Any
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None = None
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None
    p2p_communicator: Any = None
    pg_collection: Any = None
    force_all_reduce: bool | None = False

    @property
    def chunks(self) -> list[Any]:
        """Model chunks of this rank."""
        return chunks_of(self.model)

    @property
    def config(self) -> Any:
        """Configuration of the model; that of its first chunk."""
        return get_model_config(self.chunks[0])

    @property
    def sizes(self) -> dict[str, Any]:
        """What says the shape of an activation."""
        return {
            "seq_length": self.seq_length,
            "micro_batch_size": self.micro_batch_size,
            "decoder_seq_length": self.decoder_seq_length,
        }


class StepPasses(Protocol):
    """A forward and a backward by Megatron's functions, which take what crosses in the form that the model gives it."""

    def forward(
        self, *, chunk: int, input_tensor: Inputs, is_last_stage: bool, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the forward of a chunk; ``options`` are the other arguments of Megatron's function.

        Returns:
            Output (or loss), and the number of tokens in the loss.
        """
        ...

    def backward(
        self,
        chunk: int,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last_stage: bool,
    ) -> Inputs:
        """Run the backward of a chunk, and return the gradient of the activation, or of each."""
        ...


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What one step runs by.

    Attributes:
        schedule: the orders of all workers.
        channels: channels of this rank.
        passes: a forward and a backward by Megatron's functions.
        finalize_options: keywords of ``finalize_model_grads_func``, besides chunks and number of tokens.
    """

    schedule: Schedule
    channels: Mapping[CrossingId, StageChannel]
    passes: StepPasses
    finalize_options: Mapping[str, Any]


class StepBackend(Protocol):
    """What planned steps run over."""

    @property
    def runner(self) -> ScheduleRunner:
        """Runs the schedules."""
        ...

    def plan(self, call: StepCall) -> StepPlan:
        """Plan a step, once all ranks know that they can run it."""
        ...


@dataclass(kw_only=True)
class _Compute:
    """Forward and backward of this rank's chunks, as the executor calls them."""

    call: StepCall
    config: Any
    chunks: list[Any]
    iterators: list[Any]
    schedule: Schedule
    passes: StepPasses
    sync: GradSync
    num_tokens: torch.Tensor
    waiting: WeightGradients
    reports: list[Any] = field(default_factory=list[Any])
    _whole: dict[int, Sequence[torch.Tensor]] = field(default_factory=dict[int, Sequence[torch.Tensor]])

    def forward(self, action: Action, activation: Inputs, *, is_split: bool) -> torch.Tensor:
        chunk = self.schedule.placement.chunk(action.vstage)
        with self.waiting.forward(self._whole_of(chunk)) if is_split else contextlib.nullcontext():
            return self._forward(action, activation)

    def _forward(self, action: Action, activation: Inputs) -> torch.Tensor:
        placement, call = self.schedule.placement, self.call
        chunk = placement.chunk(action.vstage)
        # Replicas take turns, and Megatron counts only the microbatches of this rank.
        microbatch = action.microbatch // placement.num_replicas[placement.stages[action.vstage]]
        self.sync.before_forward(chunk)
        output, num_tokens = self.passes.forward(
            chunk=chunk,
            input_tensor=activation,
            is_last_stage=self._is_last_stage(action),
            forward_step_func=call.forward_step_func,
            data_iterator=self.iterators[chunk],
            model=self.chunks[chunk],
            num_microbatches=call.num_microbatches,
            forward_data_store=self.reports,
            config=self.config,
            collect_non_loss_data=call.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                call.first_val_step, self.schedule.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
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
        chunk, is_split = self.schedule.placement.chunk(action.vstage), action.op is Op.I
        waiting = self.waiting.backward(action.vstage, action.microbatch, self._whole_of(chunk)) if is_split else None
        with self.sync.backward(chunk, is_last=is_last, has_rest=is_split), waiting or contextlib.nullcontext():
            return self.passes.backward(chunk, activation, output, gradient, is_last_stage=self._is_last_stage(action))

    def weights(self, action: Action, *, is_last: bool) -> None:
        with self.sync.backward(self.schedule.placement.chunk(action.vstage), is_last=is_last):
            self.waiting.compute(action.vstage, action.microbatch)

    def _whole_of(self, chunk: int) -> Sequence[torch.Tensor]:
        """Look for these weights once a step, and only where backwards are split."""
        if chunk not in self._whole:
            self._whole[chunk] = whole_weights(self.chunks[chunk])
        return self._whole[chunk]

    def release(self, output: torch.Tensor) -> None:
        schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)

    def _is_last_stage(self, action: Action) -> bool:
        return action.vstage == self.schedule.placement.num_vstages - 1


def run_step(backend: StepBackend, **arguments: Any) -> list[Any]:
    """Run one step as planned, and let Megatron finish the gradients.

    Args:
        backend: what the step runs over.
        arguments: those of what Megatron's ``get_forward_backward_func`` returns.

    Returns:
        What the loss function reported.
    """
    call = StepCall(**arguments)
    # Before anything else: the ranks compare their configurations here, so if one refuses its own, all stop.
    plan = backend.plan(call)
    chunks, config, runner = call.chunks, call.config, backend.runner
    compute = _Compute(
        call=call,
        config=config,
        chunks=chunks,
        iterators=runner.iterators(call.data_iterator),
        schedule=plan.schedule,
        passes=plan.passes,
        sync=GradSync(
            config,
            chunks,
            forward_only=call.forward_only,
            is_first_stage=runner.is_first_stage,
            take_turns=runner.take_turns,
        ),
        num_tokens=torch.zeros([], dtype=torch.int, device="cuda"),
        waiting=runner.weight_gradients,
    )
    if not call.forward_only:
        runner.settle_whole(partial(linear_layers, chunks))
    with _timed(config):
        with compute.sync.step():
            runner.run(plan.schedule, plan.channels, compute)
        if config.finalize_model_grads_func is not None and not call.forward_only:
            num_tokens = compute.num_tokens if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(chunks, num_tokens, **plan.finalize_options)
    return compute.reports


def whole_weights(chunk: Any) -> list[torch.Tensor]:
    """List the weights of a chunk whose gradients come with whole backwards.

    An embedding's, which an output layer may use, too; and an output layer's, which would have to keep the gradient of
    all logits.
    """
    kinds = (torch.nn.Embedding, VocabParallelEmbedding)
    found = [module.weight for module in chunk.modules() if isinstance(module, kinds)]
    outputs = [getattr(getattr(module, "output_layer", None), "weight", None) for module in chunk.modules()]
    return found + [weight for weight in outputs if weight is not None]


def linear_layers(chunks: Sequence[Any]) -> dict[str, tuple[torch.Tensor | None, bool]]:
    """Find Megatron's linear layers by name: their weights, and whether something waits for a weight's gradient.

    That is a hook on it, or what it is computed from; then it is no parameter, and None stands for it.
    """
    found: dict[str, tuple[torch.Tensor | None, bool]] = {}
    for number, chunk in enumerate(chunks):
        for name, layer in chunk.named_modules():
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                weight: Any = layer._parameters.get("weight")
                if weight is None:
                    waits = is_parametrized(layer, "weight") or vars(layer).get("weight") is not None
                else:
                    waits = bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)
                found[f"{f'chunk {number}, ' if number else ''}{name.replace('module.', '')}"] = weight, waits
    return found


def chunks_of(model: Any) -> list[Any]:
    """Return the chunks of a model, which Megatron hands over alone or as a list."""
    return model if isinstance(model, list) else [model]


@contextmanager
def _timed(config: Any) -> Iterator[None]:
    """Measure a step with Megatron's timer."""
    if config.timers is not None:
        config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    if config.timers is not None:
        config.timers("forward-backward").stop()
