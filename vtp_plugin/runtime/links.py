"""What the executor sends and receives over: a channel between two stages of a module, or a bridge between modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from vtp_plugin.runtime.bridge import Bridge
from vtp_plugin.runtime.channel import Channel, RecvWork, TensorFormat
from vtp_plugin.runtime.work import SendWork

SplitSizes = Callable[[torch.Tensor], "Sequence[int] | None"]


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


class Link(Protocol):
    """One direction between two stages; a :class:`~vtp_plugin.runtime.channel.Channel` is one."""

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        ...

    def post(self, form: TensorFormat, shape: Sequence[int]) -> Receive:
        """Post the receive of the next tensor."""
        ...

    def send(self, tensor: torch.Tensor, form: TensorFormat) -> Send:
        """Send a tensor; it keeps its memory until the send is waited for."""
        ...


class ModuleLink:
    """One direction between two stages of a module, whose tensors have two or three dimensions.

    Args:
        channel: between the stages.
        form: how this module's tensors cross, with headers.
    """

    def __init__(self, channel: Channel, form: TensorFormat) -> None:
        self._channel = channel
        self._form = form

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._channel.start_step()

    def post(self, form: TensorFormat, shape: Sequence[int]) -> Receive:
        """Post the receive of the next tensor, whose shape comes with it; the module's format counts."""
        return _Unsqueezed(self._channel.post(self._form))

    def send(self, tensor: torch.Tensor, form: TensorFormat) -> SendWork:
        """Send a tensor; Megatron gives one of two dimensions a last one of length 1."""
        return self._channel.send(tensor.unsqueeze(-1) if tensor.dim() == 2 else tensor, self._form)


class _Unsqueezed:
    def __init__(self, work: RecvWork) -> None:
        self._work = work

    def take(self) -> torch.Tensor:
        tensor = self._work.take()
        if tensor.shape[-1] > 1:
            return tensor
        return tensor.detach().squeeze(-1).requires_grad_(tensor.requires_grad)


class _BridgeLink:
    """One direction of a bridge.

    Args:
        bridge: this rank's side.
        split_sizes: reads from a tensor how many tokens each of its samples has.
    """

    def __init__(self, bridge: Bridge, split_sizes: SplitSizes) -> None:
        self._bridge = bridge
        self._split_sizes = split_sizes

    def start_step(self) -> None:
        """Do nothing: a bridge counts on."""


class ActivationLink(_BridgeLink):
    """Activations over a bridge."""

    def post(self, form: TensorFormat, shape: Sequence[int]) -> Receive:
        """Post the receive of the next activation, or of its header."""
        self._bridge.post_forward()
        return _Taken(self._bridge.recv_forward)

    def send(self, tensor: torch.Tensor, form: TensorFormat) -> Send:
        """Send an activation."""
        return self._bridge.send_forward(tensor, self._split_sizes(tensor))


class GradientLink(_BridgeLink):
    """Gradients over a bridge."""

    def post(self, form: TensorFormat, shape: Sequence[int]) -> Receive:
        """Post the receive of the next gradient; its activation says the shape, so at the latest when that is sent."""
        return self._bridge.expect_backward()

    def send(self, tensor: torch.Tensor, form: TensorFormat) -> Send:
        """Send a gradient; nothing crosses to a frozen encoder."""
        return self._bridge.send_backward(tensor, self._split_sizes(tensor))


class _Taken:
    def __init__(self, take: Callable[[], torch.Tensor]) -> None:
        self.take = take
