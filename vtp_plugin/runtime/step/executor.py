"""The executor: carries out one rank's lowered actions. It computes by injected functions and sends over channels.

One host thread issues everything, in the order of the list. Only waits block: for receives and, at the end of a step,
for sends. :mod:`vtp_plugin.plan.schedule.order.add_communication` says where these waits stand and why.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.schedule.order.actions import (
    Action,
    Op,
    Schedule,
    channel_of,
    crossing_output,
    receives_for,
    sends_after,
    started_by,
)
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.runtime.comm.work import Recorder
from vtp_plugin.runtime.step.companion_tensors import Companions
from vtp_plugin.runtime.step.stage_channels import CrossingId, Receive, Send, SendsInARow, StageChannel
from vtp_plugin.trace.stretches import Cause

Inputs = torch.Tensor | tuple[torch.Tensor | None, ...] | None
"""What a virtual stage gets from the one before it; of several a tuple, in the order of their numbers."""


class Compute(Protocol):
    """What a virtual stage computes, by Megatron's own step functions."""

    def forward(self, action: Action, activation: Inputs, *, is_split: bool) -> torch.Tensor:
        """Run a forward; the first virtual stage gets no activation, and the last one returns the loss.

        ``is_split`` says that its backward comes in two parts.
        """
        ...

    def backward(
        self,
        action: Action,
        activation: Inputs,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> Inputs:
        """Run a backward, or its part for the input, and return the gradient of the activation, or of each.

        The last virtual stage gets no gradient of its output: its output is the loss. ``is_last`` marks the last
        such compute of this virtual stage in the step.
        """
        ...

    def weights(self, action: Action, *, is_last: bool) -> None:
        """Compute the gradients of weights that an earlier part has left; ``is_last`` is as in :meth:`backward`."""
        ...

    def release(self, output: torch.Tensor) -> None:
        """Free an output's data: it is sent, and the backward needs only its graph."""
        ...


class Executor:
    """Runs one step of a lowered schedule on one rank.

    Args:
        schedule: lowered schedule, in which every virtual stage's result crosses to another stage.
        worker: number of this rank's replica in the schedule; without replicas that is the stage.
        channels: channels of this rank.
        compute: computes the forwards and backwards of this stage.
        companions: tensors that cross with activations.
        recorder: notes how long the forwards and backwards of a training step take; None notes nothing.

    Attributes:
        shapes: local shape of the first output of a training step, by virtual stage.
    """

    def __init__(
        self,
        schedule: Schedule,
        worker: int,
        channels: Mapping[CrossingId, StageChannel],
        compute: Compute,
        companions: Companions | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        placement = schedule.placement
        if not all(placement.crosses(v) for v in range(placement.num_vstages - 1)):
            raise PlanError(f"{schedule.name}: virtual stages {placement.stages}: two in a row are on one stage")
        self._schedule = schedule
        self._placement: Placement = placement
        self._actions = schedule.orders[worker]
        self._channels = channels
        self._compute = compute
        self._companions = companions or Companions()
        self._recorder = None if schedule.forward_only else recorder
        self.shapes: dict[int, tuple[int, ...]] = {}
        self._num_left = Counter(turn for action in self._actions for turn in _turns(action))
        self._split = {(action.vstage, action.microbatch) for action in self._actions if action.op is Op.I}
        self._current: Action | None = None
        self._posted: dict[Action, Receive] = {}
        self._received: dict[Action, torch.Tensor | None] = {}
        self._results: dict[Action, torch.Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[Inputs, torch.Tensor]] = {}
        self._sends: dict[Action, Send] = {}
        self._handlers: Mapping[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._weights,
            **dict.fromkeys((Op.RECV_F, Op.RECV_B), self._post_receive),
            **dict.fromkeys((Op.WAIT_RECV_F, Op.WAIT_RECV_B), self._wait_for_receive),
            **dict.fromkeys((Op.SEND_F, Op.SEND_B), self._send),
            **dict.fromkeys((Op.WAIT_SEND_F, Op.WAIT_SEND_B), self._wait_for_send),
        }

    def run(self) -> None:
        """Carry out all actions of the worker; afterwards nothing is under way.

        Raises:
            ConfigError: the model returns no tensor to send.
            PlanError: a tensor or a receive is left over at the end.
        """
        for action in self._actions:
            self._current = action
            self._handlers[action.op](action)
        self._current = None
        left = [name for name in ("posted", "received", "results", "kept", "sends") if getattr(self, f"_{name}")]
        if left:
            raise PlanError(f"{self._schedule.name}: a step ended with tensors left over ({', '.join(left)})")

    def name_compute(self) -> str:
        """Name the forward or backward that is running, for a line about a hang; empty between two of them."""
        action = self._current
        if action is None or not action.op.is_compute:
            return ""
        kind = "backward" if action.op.is_backward else "forward"
        stage = self._placement.label(self._placement.worker_of(action.vstage, action.microbatch))
        return f"{action}, a {kind} of microbatch {action.microbatch} on {stage}"

    def _channel(self, action: Action) -> StageChannel:
        return self._channels[channel_of(self._placement, action), crossing_output(self._placement, action)]

    def _post_receive(self, action: Action) -> None:
        self._companions.post(action)
        self._posted[action] = self._channel(action).post()

    def _wait_for_receive(self, action: Action) -> None:
        receive = started_by(action)
        self._companions.take(receive)
        self._received[receive] = self._posted.pop(receive).take()

    def _send(self, action: Action) -> None:
        tensor = self._results.pop(action)
        before = self._companions.send_before(action)
        work = self._channel(action).send(tensor)
        self._sends[action] = SendsInARow(*before, work) if before else work
        if action.op is Op.SEND_F and self._has_backward(action.vstage):
            self._compute.release(tensor)

    def _wait_for_send(self, action: Action) -> None:
        self._sends.pop(started_by(action)).wait()

    def _forward(self, action: Action) -> None:
        received = self._take_received(action)
        activation = received if len(received) > 1 else next(iter(received), None)
        self._companions.enter(action)
        with self._noting(Cause.FORWARD, action):
            is_split = (action.vstage, action.microbatch) in self._split
            output = self._compute.forward(action, activation, is_split=is_split)
        self._keep_result(action, output)
        if not self._schedule.forward_only:
            self.shapes.setdefault(action.vstage, tuple(output.shape))
        if self._has_backward(action.vstage):
            # What came from virtual stages that train nothing gets no gradient.
            wanted = activation if self._placement.is_trained(action.vstage - 1) else None
            self._kept[action.vstage, action.microbatch] = wanted, output

    def _backward(self, action: Action) -> None:
        activation, output = self._kept.pop((action.vstage, action.microbatch))
        is_last = self._is_last(action)
        (gradient,) = self._take_received(action) or (None,)
        with self._noting(Cause.BACKWARD, action):
            result = self._compute.backward(action, activation, output, gradient, is_last=is_last)
        self._keep_result(action, result)

    def _weights(self, action: Action) -> None:
        is_last = self._is_last(action)
        with self._noting(Cause.WEIGHTS, action):
            self._compute.weights(action, is_last=is_last)

    def _is_last(self, action: Action) -> bool:
        turns = _turns(action)
        self._num_left.subtract(turns)
        return self._num_left[turns[0]] == 0

    def _noting(self, cause: Cause, action: Action) -> AbstractContextManager[object]:
        """Note a compute alone: the waits for what it takes are over."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.span(cause, action)

    def _has_backward(self, vstage: int) -> bool:
        return not self._schedule.forward_only and self._placement.is_trained(vstage)

    def _take_received(self, compute: Action) -> tuple[torch.Tensor | None, ...]:
        return tuple(self._received.pop(receive) for receive in receives_for(self._placement, compute))

    def _keep_result(self, compute: Action, results: Inputs) -> None:
        sends = sends_after(self._placement, compute)
        for send, result in zip(sends, results if isinstance(results, tuple) else (results,), strict=False):
            if result is None:
                what = "forward returned no tensor" if compute.op is Op.F else "backward gave no gradient of its input"
                raise ConfigError(
                    f"{compute}: the {what}, but a neighbouring stage waits for it; let the model's output depend "
                    "on its input, and return it"
                )
            self._results[send] = result


def _turns(action: Action) -> tuple[tuple[int, Op], ...]:
    """Return what counts down to the last compute of a kind on a virtual stage: a whole backward counts as both parts.

    Gradients of weights are not complete before the last whole backward, even if no other is split after it.
    """
    ops = (Op.I, Op.W) if action.op is Op.B else (action.op,)
    return tuple((action.vstage, op) for op in ops)
