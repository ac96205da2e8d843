"""A link: a channel and the form of the tensors that cross it. All that crosses between stages is sent over one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.header import Whole
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.pending_receives import RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Transmission
from vtp_plugin.runtime.comm.work import SendWork


class ChannelLink:
    """Tensors of one form over a channel; with variable shapes a header goes before each.

    Attributes:
        channel: channel that carries the tensors.
        form: type and layout of the tensors, the same at both endpoints.
        shape: shape of this rank's part; None if it varies, or if each call says it.

    Args:
        channel: channel that carries the tensors.
        form: type and layout of the tensors.
        shape: shape of this rank's part; not used with variable shapes.
    """

    def __init__(self, channel: Channel, form: TensorFormat, shape: Sequence[int] | None = None) -> None:
        self.channel = channel
        self.form = form
        self.shape = None if form.has_variable_shapes or shape is None else tuple(shape)
        # Where all tensors have one shape, it is worked out once how they cross.
        self._known = None if self.shape is None else self._transmission(channel.whole_shape(self.shape, form))

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self.channel.start_step()

    def post(self, whole: Whole | None = None) -> RecvWork:
        """Post the receive of the next tensor that the other endpoint sends, or of its header.

        Args:
            whole: description of the whole tensor, where it is neither the link's nor in a header.

        Raises:
            ConfigError: the shape of the tensor is not known.
        """
        channel, form = self.channel, self.form
        known = self._known if whole is None or form.has_variable_shapes else self._transmission(whole)
        if known is None and not form.has_variable_shapes:
            raise ConfigError(f"{channel.spec.name}: the shape of what is received is not known; give it")
        position = channel.position(channel.num_received)
        channel.num_received += 1
        return channel.receives.add(form, known, position)

    def send(self, tensor: torch.Tensor, whole: Whole | None = None) -> SendWork:
        """Send this rank's part of a tensor `[S, B, H]`; it keeps its memory until the send is waited for.

        Args:
            tensor: this rank's part.
            whole: description of the whole tensor; by default it follows from the shape of the part.

        Raises:
            ConfigError: the tensor does not have the form of its kind of message, or is not what the receiver expects.
        """
        channel, form = self.channel, self.form
        if self.shape is not None and tuple(tensor.shape) != self.shape:
            raise ConfigError(
                f"{channel.spec.name}: the tensor has the shape {list(tensor.shape)}, the next stage waits for "
                f"{list(self.shape)}; give the step the lengths that the model has, or variable_seq_lengths=True"
            )
        known = self._known
        if known is None or whole is not None:
            known = self._transmission(whole or channel.whole_shape(tensor.shape, form))
        position = channel.position(channel.num_sent)
        header = channel.headers.send(known.whole, form, position) if form.has_variable_shapes else None
        channel.num_sent += 1
        work = channel.transfers.send(tensor, known, position)
        return work if header is None else header.joined_with(work)

    def _transmission(self, whole: Whole) -> Transmission:
        return self.channel.transmission(whole, self.form)
