"""What the executor sends and receives over: a channel between two stages of a module, or a bridge between modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vtp_plugin.plan.layout.pipeline_layout import ChannelId
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.runtime.bridges.separate import Bridge
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel, RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork

SplitSizes = Callable[[torch.Tensor], "Sequence[int] | None"]
CrossingId = tuple[ChannelId, int]
"""The channel, and the virtual stage whose output or its gradient crosses: in a U of two rings two share a channel."""


class Receive(Protocol):
    """A receive under way."""

    def take(self) -> torch.Tensor | None:
        """Wait, and return the tensor; once."""
        ...


class Send(Protocol):
    """A send under way."""

    def wait(self) -> None:
        """Return when the tensor may be reused."""
        ...


class SendsInARow:
    """Sends that are waited for together, in their order."""

    def __init__(self, *sends: Send) -> None:
        self._sends = sends

    def wait(self) -> None:
        """Return when all their tensors may be reused."""
        for send in self._sends:
            send.wait()


class StageChannel(Protocol):
    """A stage channel: one direction between two virtual stages."""

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        ...

    def post(self) -> Receive:
        """Post the receive of the next tensor."""
        ...

    def send(self, tensor: torch.Tensor) -> Send:
        """Send a tensor; it keeps its memory until the send is waited for."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputForm:
    """Form of the tensors between a virtual stage and the next one; the gradients that come back have the same.

    Attributes:
        form: type and layout of every tensor.
        shape: shape of this rank's part; not used with variable shapes.
    """

    form: TensorFormat
    shape: Sequence[int]


def bind_channels(
    placement: Placement, channels: Mapping[ChannelId, Channel], output_forms: Sequence[OutputForm]
) -> dict[CrossingId, BoundChannel]:
    """Return this rank's channels, each bound to the form of its tensors.

    Args:
        placement: which stage holds which virtual stage.
        channels: channels of this rank by their identity.
        output_forms: forms of the tensors, by the virtual stage whose output they are.
    """
    return {
        (name, vstage): BoundChannel(channel, output_forms[vstage].form, output_forms[vstage].shape)
        for name, channel in channels.items()
        for vstage in vstages_over(placement, name)
    }


def vstages_over(placement: Placement, name: ChannelId) -> list[int]:
    """List the virtual stages whose outputs, or their gradients, cross a channel."""
    ends = placement.stage_of(name.upstream), placement.stage_of(name.downstream)
    return [v for v in range(placement.num_vstages - 1) if placement.stages[v : v + 2] == ends]


class ModuleChannel:
    """One direction between two stages of a module, whose tensors have two or three dimensions, with headers.

    Args:
        channel: channel between the stages.
    """

    def __init__(self, channel: BoundChannel) -> None:
        self._channel = channel

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._channel.start_step()

    def post(self) -> Receive:
        """Post the receive of the next tensor, whose shape comes with it."""
        return _Unsqueezed(self._channel.post())

    def send(self, tensor: torch.Tensor) -> SendWork:
        """Send a tensor; Megatron gives one of two dimensions a last one of length 1."""
        return self._channel.send(tensor.unsqueeze(-1) if tensor.dim() == 2 else tensor)


class _Unsqueezed:
    def __init__(self, work: RecvWork) -> None:
        self._work = work

    def take(self) -> torch.Tensor:
        tensor = self._work.take()
        if tensor.shape[-1] > 1:
            return tensor
        return tensor.detach().squeeze(-1).requires_grad_(tensor.requires_grad)


class _BridgeChannel:
    """One direction of a bridge.

    Args:
        bridge: this rank's end of the bridge.
        split_sizes: returns the number of tokens of each sample of a tensor.
    """

    def __init__(self, bridge: Bridge, split_sizes: SplitSizes) -> None:
        self._bridge = bridge
        self._split_sizes = split_sizes

    def start_step(self) -> None:
        """Do nothing: a bridge counts its microbatches over all steps."""


class ActivationChannel(_BridgeChannel):
    """Activations over a bridge."""

    def post(self) -> Receive:
        """Post the receive of the next activation, or of its header."""
        self._bridge.post_forward()
        return _Taken(self._bridge.recv_forward)

    def send(self, tensor: torch.Tensor) -> Send:
        """Send an activation."""
        return self._bridge.send_forward(tensor, self._split_sizes(tensor))


class GradientChannel(_BridgeChannel):
    """Gradients over a bridge."""

    def post(self) -> Receive:
        """Post the receive of the next gradient; this may wait until its activation is sent, which gives the shape."""
        return self._bridge.expect_backward()

    def send(self, tensor: torch.Tensor) -> Send:
        """Send a gradient; nothing crosses to a frozen encoder."""
        return self._bridge.send_backward(tensor, self._split_sizes(tensor))


class _Taken:
    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take
