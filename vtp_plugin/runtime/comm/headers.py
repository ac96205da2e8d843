"""The headers of a channel: where shapes vary, one crosses before every tensor and says what comes."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.compiled_plan import compile_plan
from vtp_plugin.plan.boundary.header import Bound, Expected, Whole
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Transfers, Transmission
from vtp_plugin.runtime.comm.work import PendingRecv, SendWork


class Headers:
    """Sends and receives the headers of one channel.

    Args:
        spec: the channel as data.
        rank: this rank.
        peer: name of the ranks at the other end.
        transfers: posts the messages.
        platform: says where headers are allocated, and how much memory a tensor may take.
        is_coalesced: whether headers are coalesced into one call of the backend.
    """

    def __init__(
        self, spec: ChannelSpec, rank: int, peer: str, transfers: Transfers, platform: Platform, *, is_coalesced: bool
    ) -> None:
        self._transfers = transfers
        self._platform = platform
        self._peer = peer
        self._num_ranks = len((spec.src if rank in spec.src.ranks else spec.dst).ranks)
        self._codec = spec.header_codec(rank)
        plan = spec.plan_header(self._codec.length)
        self._shape = plan.src.holdings[0].local_shape
        self._transmission = Transmission(
            whole=plan.src.shape,
            plan=compile_plan(plan, rank),
            dtype=torch.int64,
            kind=self._codec.kind,
            peer=peer,
            is_batched=is_coalesced,
        )

    def send(self, whole: Whole, form: TensorFormat, position: str) -> SendWork:
        """Send shape and type of the tensor that follows: an int64 tensor, never a pickled object."""
        values = self._codec.encode(whole, str(form.dtype), position)
        header = torch.tensor(values, dtype=torch.int64, device=self._platform.device())
        return self._transfers.send(header.reshape(self._shape), self._transmission, position)

    def post(self, position: str) -> PendingRecv:
        """Post the receive of a header."""
        return self._transfers.receive(self._transmission, position)

    def read(self, header: torch.Tensor, form: TensorFormat, position: str) -> Whole:
        """Return the description of the tensor that a header announces.

        Raises:
            ConfigError: this rank expects another tensor.
        """
        expected = Expected(
            dtype=str(form.dtype),
            width=form.width,
            position=position,
            sources=self._peer,
            bounds=tuple(self._bounds(form)),
        )
        return self._codec.decode(header.reshape(-1, self._codec.length).tolist(), expected)

    def _bounds(self, form: TensorFormat) -> Iterator[Bound]:
        if form.most_tokens is not None and form.width is not None:
            why = "the lengths and the micro batch size of this rank's arguments; raise --max-position-embeddings"
            yield Bound(most=form.most_tokens * form.width, why=why)
        # At worst one rank of this endpoint gets as much as all of them may get together.
        why = f"what {self._num_ranks} of this rank's devices hold; look for a rank that sends another tensor"
        yield Bound(most=self._num_ranks * self._memory_bytes // form.dtype.itemsize, why=why)

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return self._platform.memory_bytes()
