"""A bridge: two channels between two modules, one for activations and one for their gradients."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.boundary.bridge import HEADER_FIELDS, BridgeSpec, unit_widths
from vtp_plugin.boundary.bridge_end import BridgeEnd
from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.side import Shape, Side
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.runtime.batch_axes import BatchAxes
from vtp_plugin.runtime.channel import DTYPES, Channel, RecvWork, TensorFormat
from vtp_plugin.runtime.transfers import Parcel
from vtp_plugin.runtime.work import OpenSends

Batch = Shape
"""Rows and depth of the whole tensor, then the length of every unit of the batch. Of units that neither come to this
rank nor leave it, the length is 0."""


class BridgeChannel(Channel):
    """One direction of a bridge. A header has one row for every share of the batch that a rank gets units of."""

    spec: BridgeSpec

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a channel takes."""
        super().__init__(*args, **kwargs)
        self._batches: dict[RecvWork, Batch] = {}

    @property
    def header_length(self) -> int:
        """Integers of the header of one share."""
        return self.spec.header_length

    @property
    def is_batched(self) -> bool:
        """Whether messages are coalesced: then all of them use one communicator of the backend."""
        return not self._platform.host_blocking_wait

    def batch_of(self, tensor: torch.Tensor, sizes: Sequence[int] | None) -> Batch:
        """Describe this rank's share of the batch.

        Args:
            tensor: `[rows, batch, depth]`, this rank's part.
            sizes: tokens of every sample, or of every unit; None cuts the share evenly.

        Raises:
            ConfigError: the share cannot be cut for the other module.
        """
        side, end = self._own_end
        rows = tensor.shape[0] * side.num_parts(is_sharded=end.is_sliced(num_dims=self.spec.num_dims))
        own = self.spec.units_of(dist.get_rank())
        widths = [0] * self.spec.num_units
        widths[own.start : own.stop] = unit_widths(tensor.shape[1], len(own), sizes)
        return (rows, tensor.shape[2], *widths)

    def send_batch(self, tensor: torch.Tensor, batch: Batch, form: TensorFormat, opens: OpenSends) -> None:
        """Send this rank's part `[rows, batch, depth]`."""
        opens.add(self._send(tensor, batch, form))

    def post_batch(self, form: TensorFormat, batch: Batch | None) -> RecvWork:
        """Post the receive of the next tensor; its header comes first if the batch is not known."""
        return self._post(form, batch)

    def batch_received(self, work: RecvWork) -> Batch:
        """Return the batch of a receive, once it was posted; once only."""
        return self._batches.pop(work)

    def local_shape_of(self, batch: Batch) -> Shape:
        """Return the shape of this rank's part of a batch."""
        rows, depth, *widths = batch
        side, end = self._own_end
        own = self.spec.units_of(dist.get_rank())
        parts = side.num_parts(is_sharded=end.is_sliced(num_dims=self.spec.num_dims))
        return rows // parts, sum(widths[own.start : own.stop]), depth

    def warm_up(self) -> None:
        """Let the backend connect."""
        self._transfers.warm_up(self.spec.probe, is_batched=self.is_batched)

    @property
    def _own_end(self) -> tuple[Side, BridgeEnd]:
        is_src = dist.get_rank() in self.spec.src.ranks
        return (self.spec.src, self.spec.src_end) if is_src else (self.spec.dst, self.spec.dst_end)

    def _post_tensor(self, receive: RecvWork, whole: Batch) -> None:
        self._batches[receive] = whole
        super()._post_tensor(receive, whole)

    def _parcel(self, whole: Batch, form: TensorFormat, position: str, peer: str) -> Parcel:
        rows, depth, *widths = whole
        parcel = super()._parcel((rows, self.spec.num_units, depth), form, position, peer)
        return replace(parcel, widths=tuple(widths))

    def _header_parcel(self, position: str, peer: str) -> Parcel:
        parcel = super()._header_parcel(position, peer)
        return replace(parcel, cargo=Cargo.BRIDGE_HEADER, is_batched=self.is_batched)

    def _header_of(self, whole: Batch, position: str) -> tuple[int, ...]:
        rows, depth, *widths = whole
        own = self.spec.units_of(dist.get_rank())
        return (rows, depth, *widths[own.start : own.stop])

    def _shape_in(self, header: torch.Tensor, receive: RecvWork) -> Batch:
        lines = [[int(value) for value in line] for line in header.tolist()]
        known = {(rows, depth, code) for rows, depth, *_, code in lines}
        rows, depth, code = min(known)
        sent = DTYPES[code] if 0 <= code < len(DTYPES) else f"type {code}"
        if len(known) > 1 or sent != receive.form.dtype or min(rows, depth) < 1:
            # To receive it would end the process inside the backend.
            said = " and ".join(f"{DTYPES[c]} of {r} rows and {d} columns" for r, d, c in sorted(known))
            raise ConfigError(
                f"{receive.position}: {self._sources} would send {said}, expected is one shape of "
                f"{receive.form.dtype}; give both modules one hidden size, sequence length and type (comm_dtype)"
            )
        own = self.spec.units_of(dist.get_rank())
        sent_units = self.spec.num_units // self.spec.src.num_replicas
        widths = [0] * self.spec.num_units
        first_share = own.start // sent_units
        for share, line in enumerate(lines, first_share):
            widths[share * sent_units : (share + 1) * sent_units] = line[HEADER_FIELDS - 1 : -1]
        # Of shares that this rank gets in part, the units of others do not matter.
        kept = [width if unit in own else 0 for unit, width in enumerate(widths)]
        return (rows, depth, *kept)


class Bridge:
    """This rank's side of a bridge.

    Microbatches cross in one order, and gradients come back in the same. What is sent keeps its memory until the
    backend has it; a tensor must not be changed in place before that, as between pipeline stages.

    Args:
        forward: channel of activations.
        backward: channel of gradients.
        axes: of the module's tensors.
        dtype: of all tensors.
        fixed_shape: shape of the share of one replica of the source, whole; no headers cross then.
        has_gradient: whether gradients come back.
        agree: compares statements over all ranks of the bridge before anything is sent.
    """

    def __init__(
        self,
        forward: BridgeChannel,
        backward: BridgeChannel,
        *,
        axes: BatchAxes,
        dtype: torch.dtype,
        fixed_shape: Sequence[int] | None = None,
        has_gradient: bool = True,
        agree: Callable[[Callable[[], Mapping[str, object]]], None],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._axes = axes
        self._has_gradient = has_gradient
        self._agree = agree
        self._is_agreed = False
        self._form = TensorFormat(
            dtype=dtype, has_variable_shapes=True, is_batched=forward.is_batched, requires_grad=False
        )
        self._known = replace(self._form, has_variable_shapes=False)
        self._fixed = None if fixed_shape is None else self._fixed_batch(fixed_shape)
        self._opens = OpenSends()
        self._posted: deque[RecvWork] = deque()
        # Of microbatches whose gradient has not come back.
        self._batches: deque[Batch] = deque()
        # Where none crosses: zeros for tensors whose gradient Megatron's schedules need.
        self._zeros: deque[torch.Tensor | None] = deque()
        weakref.finalize(self, _drain, self._opens)

    @property
    def has_gradient(self) -> bool:
        """Whether gradients come back."""
        return self._has_gradient

    @has_gradient.setter
    def has_gradient(self, value: bool) -> None:
        """Say so on all ranks of the bridge, before the first message; later it raises ConfigError."""
        if self._is_agreed and value != self._has_gradient:
            raise ConfigError(f"{self._forward.spec.name}: has_gradient is set after the first message; set it before")
        self._has_gradient = value

    def send_forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> None:
        """Send this rank's part of an activation.

        Args:
            tensor: with the module's axes.
            sizes: tokens of every sample, where they differ.

        Raises:
            ConfigError: the tensor is not what the other module expects, or cannot be cut for it.
        """
        batch = self._checked(self._forward, tensor, sizes, self._fixed)
        self._note(batch)
        self._note_zeros(tensor)
        self._send(self._forward, tensor, batch, has_header=self._fixed is None)

    def post_forward(self) -> None:
        """Post the receive of the next activation, before the compute that hides it."""
        self._settle(dict)
        form = self._form if self._fixed is None else self._known
        self._posted.append(self._forward.post_batch(form, self._fixed))

    def recv_forward(self) -> torch.Tensor:
        """Return the next activation, a fresh leaf: this rank's part, with the module's axes."""
        if not self._posted:
            self.post_forward()
        work = self._posted.popleft()
        tensor = self._axes.from_plan(work.take())
        batch = self._forward.batch_received(work)
        self._note(batch)
        # Also where no gradient goes back: Megatron's schedules ask every input for its gradient.
        return tensor.requires_grad_(torch.is_grad_enabled())

    def send_backward(self, grad: torch.Tensor, sizes: Sequence[int] | None = None) -> None:
        """Send the gradient of the oldest activation that has none yet; arguments and error as for send_forward."""
        if not self._has_gradient:
            return
        known = self._batches.popleft() if self._batches else None
        batch = self._checked(self._backward, grad, sizes, known)
        self._send(self._backward, grad, batch, has_header=known is None)

    def post_backward(self) -> RecvWork | None:
        """Post the receive of the next gradient; None if none comes back."""
        if not self._has_gradient:
            return None
        self._settle(dict)
        # A header crosses only if the gradient is not that of an activation: both sides know.
        return self._post_backward(self._batches.popleft() if self._batches else None)

    def take_backward(self, work: RecvWork | None) -> torch.Tensor | None:
        """Return the gradient of a receive; None if none comes back, or zeros if the activation required one."""
        if work is None:
            return self._zeros.popleft() if self._zeros else None
        tensor = self._axes.from_plan(work.take())
        self._backward.batch_received(work)
        return tensor

    def exchange_forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor | None:
        """Send an activation, and return the gradient of an earlier one, with both under way at once."""
        # The activation may be the first one: whether a gradient has a header depends on what came before.
        batch = self._checked(self._forward, tensor, sizes, self._fixed)
        earlier = self._batches.popleft() if self._batches else None
        self._send(self._forward, tensor, batch, has_header=self._fixed is None)
        self._note(batch)
        self._note_zeros(tensor)
        if not self._has_gradient:
            return self.take_backward(None)
        return self.take_backward(self._post_backward(earlier))

    def exchange_backward(self, grad: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Send the gradient of an earlier activation, and return the next one, with both under way at once."""
        if not self._posted:
            self.post_forward()
        self.send_backward(grad, sizes)
        return self.recv_forward()

    def _post_backward(self, known: Batch | None) -> RecvWork:
        return self._backward.post_batch(self._form if known is None else self._known, known)

    def _note(self, batch: Batch) -> None:
        """Remember a batch whose gradient will come back: none does in evaluation, which runs without gradients."""
        if self._has_gradient and torch.is_grad_enabled():
            self._batches.append(batch)

    def _note_zeros(self, tensor: torch.Tensor) -> None:
        if not self._has_gradient and torch.is_grad_enabled():
            zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            self._zeros.append(zero.expand(tensor.shape) if tensor.requires_grad else None)

    def _send(self, channel: BridgeChannel, tensor: torch.Tensor, batch: Batch, *, has_header: bool) -> None:
        form = self._form if has_header else self._known
        channel.send_batch(self._axes.to_plan(tensor), batch, form, self._opens)

    def _checked(
        self, channel: BridgeChannel, tensor: torch.Tensor, sizes: Sequence[int] | None, known: Batch | None
    ) -> Batch:
        """Return the batch that a tensor is a part of, if it may be sent."""
        found: list[Batch] = []

        def state() -> Mapping[str, object]:
            if tensor.dim() != self._axes.num_dims:
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of shape {tuple(tensor.shape)}, the bridge is for "
                    f"{self._axes.num_dims} dimensions; set tensor_ndim to those of the module's output"
                )
            if tensor.dtype != self._form.dtype:
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of {tensor.dtype}, the bridge is for {self._form.dtype}; set "
                    "comm_dtype to the type of the module's output"
                )
            planned = self._axes.to_plan(tensor)
            shape = channel.local_shape_of(known) if known is not None else tuple(planned.shape)
            if shape != tuple(planned.shape):
                wanted = tuple(self._axes.from_plan(planned.new_empty(0).new_empty(shape)).shape)
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of shape {tuple(tensor.shape)}, expected is {wanted}; give the "
                    "shape of the activation, or with fixed_shape that one"
                )
            found.append(known if known is not None else channel.batch_of(planned, sizes))
            hidden = planned.shape[2] if self._axes.num_dims == 3 else planned.shape[0]
            said = {"dimensions": tensor.dim(), "hidden size": hidden, "sequence length": found[0][0]}
            return said if self._axes.num_dims == 3 else {"hidden size": hidden}

        self._settle(state)
        return found[0]

    def _settle(self, state: Callable[[], Mapping[str, object]]) -> None:
        """Check on all ranks before the first message; later only here."""
        if self._is_agreed:
            state()
            return
        known = {"type": str(self._form.dtype), "has_gradient": self._has_gradient}
        self._agree(lambda: {**known, **state()})
        self._is_agreed = True

    def _fixed_batch(self, shape: Sequence[int]) -> Batch:
        spec = self._forward.spec
        if len(shape) != self._axes.num_dims:
            raise ConfigError(f"{spec.name}: fixed_shape {tuple(shape)} does not have {self._axes.num_dims} dimensions")
        rows, length, depth = self._axes.to_plan(torch.empty(tuple(shape), device="meta")).shape
        shares = spec.src.num_replicas // len(spec.src_end.ranks)
        if length % shares:
            raise ConfigError(f"{spec.name}: {length} tokens cannot be cut into {shares} equal parts; see fixed_shape")
        widths = unit_widths(length // shares, spec.num_units // spec.src.num_replicas)
        return (rows, depth, *(widths * spec.src.num_replicas))


def _drain(opens: OpenSends) -> None:
    """Wait for what is under way when a bridge ends: it would be lost with the process."""
    if getattr(sys, "last_value", None) is not None:
        # This process ends by an error: nobody may come to receive.
        return
    with suppress(PeerError):
        opens.wait()
