"""The plan of one tensor, or of the header before it, and the transmission that a channel's transfers carry out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.endpoint import Endpoint, Shape
from vtp_plugin.plan.boundary.header import Bound, Expected, Whole
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Transfers, Transmission
from vtp_plugin.runtime.comm.work import PendingRecv, SendWork, ranks_text

# Where lengths vary, a run meets so many shapes that it must not keep all their plans.
NUM_PLANS = 256


class Dispatch:
    """Sends and posts the tensors and headers of one channel; keeps the plans that it has made.

    Args:
        spec: the channel as data: endpoints, strategy, kind of message.
        transfers: posts the messages.
        platform: says where headers are allocated, and how ranks swap slices.
        is_coalesced: whether headers are coalesced into one call of the backend.
    """

    def __init__(self, spec: ChannelSpec, transfers: Transfers, platform: Platform, *, is_coalesced: bool) -> None:
        self._spec = spec
        self._transfers = transfers
        self._platform = platform
        self._is_coalesced = is_coalesced
        rank = dist.get_rank()
        self._is_src = rank in spec.src.ranks
        self._codec = spec.header_codec(rank)
        self._header_plan = spec.plan_header(self._codec.length)
        self._plan = functools.lru_cache(NUM_PLANS)(spec.plan)
        probe = spec.probe
        self._sources = ranks_text({t.src for t in probe.receives_of(rank)} or {t.src for t in probe.transfers})
        self._destinations = ranks_text({t.dst for t in probe.sends_of(rank)})

    def whole_shape(self, local: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape `[S, B, ...]` of the whole tensor, given that of this rank's part."""
        endpoint, is_sharded = self._own_endpoint(form)
        return endpoint.whole_shape(local, is_sharded=is_sharded)

    def local_shape(self, whole: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape of this rank's part, given that of the whole; inverse of :meth:`whole_shape`."""
        endpoint, is_sharded = self._own_endpoint(form)
        return endpoint.local_shape(whole, is_sharded=is_sharded)

    def send(self, tensor: torch.Tensor, whole: Whole, form: TensorFormat, position: str) -> SendWork:
        """Send this rank's part of a tensor."""
        return self._transfers.send(tensor, self._transmission(whole, form, position, self._destinations))

    def send_header(self, whole: Whole, form: TensorFormat, position: str) -> SendWork:
        """Send shape and type of the tensor that follows: an int64 tensor, never a pickled object."""
        values = self._codec.encode(whole, str(form.dtype), position)
        header = torch.tensor(values, dtype=torch.int64, device=self._platform.device())
        shape = self._header_plan.src.holdings[0].local_shape
        return self._transfers.send(header.reshape(shape), self._header_transmission(position, self._destinations))

    def post(self, whole: Whole, form: TensorFormat, position: str) -> PendingRecv:
        """Post the receive of this rank's part of a tensor."""
        return self._transfers.receive(self._transmission(whole, form, position, self._sources))

    def post_header(self, position: str) -> PendingRecv:
        """Post the receive of a header."""
        return self._transfers.receive(self._header_transmission(position, self._sources))

    def read_header(self, header: torch.Tensor, form: TensorFormat, position: str) -> Whole:
        """Return the description of the tensor that a header announces.

        Raises:
            ConfigError: this rank expects another tensor.
        """
        expected = Expected(
            dtype=str(form.dtype),
            width=form.width,
            position=position,
            sources=self._sources,
            bounds=tuple(self._bounds(form)),
        )
        return self._codec.decode(header.reshape(-1, self._codec.length).tolist(), expected)

    def _bounds(self, form: TensorFormat) -> Iterator[Bound]:
        if form.most_tokens is not None and form.width is not None:
            why = "the lengths and the micro batch size of this rank's arguments; raise --max-position-embeddings"
            yield Bound(most=form.most_tokens * form.width, why=why)
        # At worst one rank of this endpoint gets as much as all of them may get together.
        num_ranks = len(self._own_endpoint(form)[0].ranks)
        why = f"what {num_ranks} of this rank's devices hold; look for a rank that sends another tensor"
        yield Bound(most=num_ranks * self._memory_bytes // form.dtype.itemsize, why=why)

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return self._platform.memory_bytes()

    def _own_endpoint(self, form: TensorFormat) -> tuple[Endpoint, bool]:
        return (self._spec.src, form.src_sharded) if self._is_src else (self._spec.dst, form.dst_sharded)

    def _transmission(self, whole: Whole, form: TensorFormat, position: str, peer: str) -> Transmission:
        shape, widths = self._spec.crossing(whole)
        return Transmission(
            plan=self._plan(shape, src_sharded=form.src_sharded, dst_sharded=form.dst_sharded),
            dtype=form.dtype,
            kind=self._spec.kind,
            position=position,
            peer=peer,
            is_batched=form.is_batched,
            in_portions=self._platform.gathers_by_messages,
            widths=widths,
        )

    def _header_transmission(self, position: str, peer: str) -> Transmission:
        return Transmission(
            plan=self._header_plan,
            dtype=torch.int64,
            kind=self._codec.kind,
            position=position,
            peer=peer,
            is_batched=self._is_coalesced,
        )
