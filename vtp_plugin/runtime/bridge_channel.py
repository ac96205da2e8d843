"""One direction of a bridge between two modules, and the batch that its messages are parts of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.boundary.bridge import HEADER_FIELDS, BridgeSpec, unit_widths
from vtp_plugin.boundary.bridge_end import BridgeEnd
from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.side import Shape, Side
from vtp_plugin.errors import ConfigError
from vtp_plugin.runtime.channel import DTYPES, Channel, RecvWork, TensorFormat
from vtp_plugin.runtime.transfers import Parcel
from vtp_plugin.runtime.work import OpenSends, SendWork

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

    def send_batch(self, tensor: torch.Tensor, batch: Batch, form: TensorFormat, opens: OpenSends) -> SendWork:
        """Send this rank's part `[rows, batch, depth]`."""
        return opens.add(self._send(tensor, batch, form))

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
