"""The executor: walks one rank's lowered actions, computes by injected functions and moves tensors over channels.

One host thread issues everything, in the order of the list. Nothing blocks but the waits for what is received, and at
the end of a step those for what is sent; :mod:`vtp_plugin.schedule.order.lower` says where they stand and why.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from vtp_plugin.boundary.plan import BoundaryPlan
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.layout.channel import ChannelId
from vtp_plugin.runtime.communicator import ExchangeOptions, Work
from vtp_plugin.runtime.transport import Channel
from vtp_plugin.schedule import Action, Op, Placement, Schedule, channel_of, started_by
from vtp_plugin.schedule.order.messages import receive_for, send_after


class Compute(Protocol):
    """What a virtual stage computes; Megatron's own step functions stand behind it."""

    def forward(self, action: Action, activation: torch.Tensor | None) -> torch.Tensor:
        """Run a forward; the first virtual stage gets no activation, the last one returns the loss."""
        ...

    def backward(
        self,
        action: Action,
        activation: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        *,
        is_last: bool,
    ) -> torch.Tensor | None:
        """Run a backward and return the activation's gradient; the last virtual stage gets none of its output.

        ``is_last`` says that it is the last one of its virtual stage in this step.
        """
        ...

    def release(self, output: torch.Tensor) -> None:
        """Let go of an output's data: it is sent, and the backward needs its graph only."""
        ...


class Link:
    """One channel during one step: a queue of tensors, in the order in which the other side sends.

    With variable shapes a header goes before every tensor. The receive of a tensor is posted when its header has come,
    and the next header's right behind it, so that both sides use the channel in one order.

    Args:
        channel: carries the tensors.
        options: how they cross.
        shape: local shape of every tensor; not used with variable shapes.
    """

    def __init__(self, channel: Channel, options: ExchangeOptions, shape: Sequence[int]) -> None:
        self._channel = channel
        self._options = options
        self._shape = shape
        self._expected: deque[Action] = deque()
        self._header: tuple[torch.Tensor, Work] | None = None
        self._posted: deque[tuple[Action, torch.Tensor, Work]] = deque()
        self._arrived: dict[Action, torch.Tensor] = {}
        channel.start_step()

    def send(self, tensor: torch.Tensor) -> list[Work]:
        """Post a tensor; the works hold its memory until they are waited for."""
        channel, options = self._channel, self._options
        whole = channel.whole_shape(tensor.shape, is_sharded=options.is_sharded)
        works: list[Work] = []
        if options.has_variable_shapes:
            works.append(channel.post_header_send(whole, options.dtype))
        works.append(channel.post_send(tensor, self._plan(whole), options.dtype, batched=options.is_batched))
        return works

    def post(self, receive: Action) -> None:
        """Post the receive of the next tensor that the other side sends, under the name of its action."""
        self._expected.append(receive)
        if not self._options.has_variable_shapes:
            self._post_tensor(self._channel.whole_shape(self._shape, is_sharded=self._options.is_sharded))
        elif self._header is None:
            self._header = self._channel.post_header_recv()

    def take(self, receive: Action) -> torch.Tensor:
        """Wait for a tensor; those that were sent before it are waited for first."""
        while receive not in self._arrived:
            if self._header is not None and not self._posted:
                self._read_header()
            name, tensor, work = self._posted.popleft()
            work.wait()
            self._arrived[name] = tensor
        return self._arrived.pop(receive)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is expected, posted or kept."""
        return not (self._expected or self._posted or self._arrived)

    def _read_header(self) -> None:
        assert self._header is not None
        header, work = self._header
        work.wait()
        self._post_tensor(self._channel.read_header(header, self._options.dtype, width=self._options.width))
        self._header = self._channel.post_header_recv() if self._expected else None

    def _post_tensor(self, whole: tuple[int, ...]) -> None:
        tensor, work = self._channel.post_recv(self._plan(whole), self._options.dtype, batched=self._options.is_batched)
        self._posted.append((self._expected.popleft(), tensor, work))

    def _plan(self, whole: tuple[int, ...]) -> BoundaryPlan:
        is_sharded = self._options.is_sharded
        return self._channel.plan(whole, src_sharded=is_sharded, dst_sharded=is_sharded)


class Executor:
    """Runs one step of a lowered schedule on one rank.

    Args:
        schedule: lowered; every virtual stage's result crosses to another stage.
        worker: the own replica of the own stage; without replicas that is the stage.
        links: of this step, by the schedule's names of the channels.
        compute: what the virtual stages of this stage compute.
    """

    def __init__(self, schedule: Schedule, worker: int, links: Mapping[ChannelId, Link], compute: Compute) -> None:
        placement = schedule.placement
        if not all(placement.crosses(v) for v in range(placement.num_vstages - 1)):
            raise PlanError(f"{schedule.name}: virtual stages {placement.stages}: two in a row are on one stage")
        self._schedule = schedule
        self._placement: Placement = placement
        self._actions = schedule.orders[worker]
        self._links = links
        self._compute = compute
        self._num_backwards_left = Counter(action.vstage for action in self._actions if action.op is Op.B)
        self._received: dict[Action, torch.Tensor] = {}
        self._results: dict[Action, torch.Tensor] = {}
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._sends: dict[Action, list[Work]] = {}
        self._handlers: Mapping[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            **dict.fromkeys((Op.RECV_F, Op.RECV_B), self._post_receive),
            **dict.fromkeys((Op.WAIT_RECV_F, Op.WAIT_RECV_B), self._wait_for_receive),
            **dict.fromkeys((Op.SEND_F, Op.SEND_B), self._send),
            **dict.fromkeys((Op.WAIT_SEND_F, Op.WAIT_SEND_B), self._wait_for_send),
        }

    def run(self) -> None:
        """Carry out all actions of the worker; afterwards nothing is under way.

        Raises:
            ConfigError: the model gives nothing to send.
            PlanError: something is left over.
        """
        for action in self._actions:
            self._handlers[action.op](action)
        left = [name for name in ("received", "results", "kept", "sends") if getattr(self, f"_{name}")]
        left += [f"messages on {name}" for name, link in self._links.items() if not link.is_idle]
        if left:
            raise PlanError(f"{self._schedule.name}: a step ended with tensors left over ({', '.join(left)})")

    def _link(self, action: Action) -> Link:
        return self._links[channel_of(self._placement, action)]

    def _post_receive(self, action: Action) -> None:
        self._link(action).post(action)

    def _wait_for_receive(self, action: Action) -> None:
        receive = started_by(action)
        self._received[receive] = self._link(receive).take(receive)

    def _send(self, action: Action) -> None:
        tensor = self._results.pop(action)
        self._sends[action] = self._link(action).send(tensor)
        if action.op is Op.SEND_F and not self._schedule.forward_only:
            self._compute.release(tensor)

    def _wait_for_send(self, action: Action) -> None:
        for work in self._sends.pop(started_by(action)):
            work.wait()

    def _forward(self, action: Action) -> None:
        activation = self._take_received(action)
        output = self._compute.forward(action, activation)
        self._keep_result(action, output)
        if not self._schedule.forward_only:
            self._kept[action.vstage, action.microbatch] = activation, output

    def _backward(self, action: Action) -> None:
        activation, output = self._kept.pop((action.vstage, action.microbatch))
        self._num_backwards_left[action.vstage] -= 1
        is_last = self._num_backwards_left[action.vstage] == 0
        gradient = self._compute.backward(action, activation, output, self._take_received(action), is_last=is_last)
        self._keep_result(action, gradient)

    def _take_received(self, compute: Action) -> torch.Tensor | None:
        receive = receive_for(self._placement, compute)
        return None if receive is None else self._received.pop(receive)

    def _keep_result(self, compute: Action, result: torch.Tensor | None) -> None:
        send = send_after(self._placement, compute)
        if send is not None:
            if result is None:
                what = "forward returned no tensor" if compute.op is Op.F else "backward gave no gradient of its input"
                raise ConfigError(
                    f"{compute}: the {what}, but a neighbouring stage waits for it; let the model's output depend "
                    "on its input, and return it"
                )
            self._results[send] = result
