"""The lengths of packed samples in a U-shaped pipeline: the edge reads them with its rows, and the cloud needs them.

Attention has to know where the samples of a row end, and only the edge has data. So the lengths cross before the
activation of their microbatch, into every stage of the cloud and over the same links. There they take the place of the
data: the script's forward step finds them in its iterator. What crosses back to the edge goes without: it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.errors import ConfigError
from vtp_plugin.layout.channel import ChannelId, Direction
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.step.links import ChannelLink
from vtp_plugin.runtime.wire.channel import Channel
from vtp_plugin.runtime.wire.receives import RecvWork
from vtp_plugin.runtime.wire.tensor_format import TensorFormat
from vtp_plugin.runtime.wire.work import SendWork
from vtp_plugin.schedule.order.actions import Action, Op
from vtp_plugin.schedule.order.messages import channel_of
from vtp_plugin.schedule.order.placement import Placement

_WAY_OUT = "give rows as Megatron's data sets do, with --micro-batch-size 1"


class Lengths:
    """The lengths of this rank's microbatches, and their way into the cloud. Used from the main thread only.

    Args:
        placement: which stage holds which virtual stage; stage 0 is the edge.
        stage: of this rank.
        channels: of this rank, by the schedule's names.
        row_length: tokens of a row.
        platform: where this rank computes.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        channels: Mapping[ChannelId, Channel],
        row_length: int,
        platform: Platform,
    ) -> None:
        self._placement = placement
        self._is_edge = stage == 0
        self._shape = row_length + 1, 1, 1
        self._platform = platform
        self._channels = {
            name: channel.crossed_by("rank0", unit="lengths of microbatch", cargo=Cargo.LENGTHS)
            for name, channel in channels.items()
            if name.direction is Direction.FORWARD and placement.stage_of(name.dst) != 0
        }
        self._links: dict[ChannelId, ChannelLink] = {}
        self._posted: dict[Action, RecvWork] = {}
        self._held: dict[tuple[int, int], torch.Tensor] = {}
        self._now = -1, -1

    def start_step(self, *, is_batched: bool) -> None:
        """Count microbatches from 0 again.

        Args:
            is_batched: coalesce messages into one call of the backend, as those of the activations are.
        """
        form = TensorFormat(dtype=torch.int32, is_batched=is_batched, requires_grad=False)
        self._links = {name: ChannelLink(channel, form, self._shape) for name, channel in self._channels.items()}
        for link in self._links.values():
            link.start_step()
        self._held.clear()

    def iterators(self, iterators: Sequence[Any]) -> list[Any]:
        """Give the iterators that the script's forward step reads, one for each chunk.

        Args:
            iterators: Megatron's. On the edge they are read as before; a rank that reads nothing has None.
        """
        if not self._is_edge:
            return [_Reader(self._row) for _ in iterators]
        return [None if rows is None else _Reader(self._watched(rows)) for rows in iterators]

    def post(self, receive: Action) -> None:
        """Post the receive of the lengths of an activation, before that of the activation itself."""
        link = self._links.get(channel_of(self._placement, receive))
        if link is not None and receive.op is Op.RECV_F:
            self._posted[receive] = link.post()

    def take(self, receive: Action) -> None:
        """Wait for the lengths of an activation."""
        posted = self._posted.pop(receive, None)
        if posted is not None:
            self._held[receive.vstage, receive.microbatch] = posted.take()

    def enter(self, forward: Action) -> None:
        """Note which forward reads from now on."""
        self._now = forward.vstage, forward.microbatch

    def send(self, send: Action) -> SendWork | None:
        """Send the lengths of an activation, before the activation itself; None if it goes without."""
        held = self._held.pop((send.vstage, send.microbatch), None)
        link = self._links.get(channel_of(self._placement, send))
        if link is None or send.op is not Op.SEND_F:
            return None
        if held is None:
            if link.channel.sends_from_here:
                raise ConfigError(
                    f"{send}: the script's forward step has read no row, so the cloud would not know where its samples "
                    "end; read one row in every forward of the edge"
                )
            held = torch.zeros(self._shape, dtype=torch.int32, device=self._platform.device())
        return link.send(held)

    def _watched(self, rows: Iterator[Any]) -> Callable[[], Any]:
        def read() -> Any:
            row = next(rows)
            if self._placement.crosses(self._now[0]):
                if self._now in self._held:
                    raise ConfigError(f"a forward step that reads two rows; a microbatch is one row; {_WAY_OUT}")
                self._held[self._now] = self._read(row)
            return row

        return read

    def _read(self, row: Any) -> torch.Tensor:
        ends = padded_ends(row, self._shape[0])
        return ends.view(self._shape).to(self._platform.device(), non_blocking=True)

    def _row(self) -> dict[str, torch.Tensor]:
        """Give what a row says besides its tokens, in the form of Megatron's data sets."""
        ends = self._held[self._now].view(1, -1)
        return {"cu_seqlens": ends, "max_seqlen": ends.diff().amax(dim=1)}


class _Reader:
    """Iterator that reads by a function."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> Any:
        return self._read()


def padded_ends(row: Any, length: int) -> torch.Tensor:
    """Give where the samples of a row end, as int32 of a fixed length, padded with the last end.

    Args:
        row: a microbatch as data loaders give it; ``cu_seqlens`` is ``[1, n]``, counts up from 0, may be padded.
        length: of the result; one more than a row has tokens.

    Raises:
        ConfigError: the row does not say it in this form.

    >>> padded_ends({"cu_seqlens": torch.tensor([[0, 2, 5, 5]])}, 6).tolist()
    [0, 2, 5, 5, 5, 5]
    """
    given = row if isinstance(row, Mapping) else {}
    ends, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if not isinstance(ends, torch.Tensor) or padded is not None:
        what = "a row without cu_seqlens" if padded is None else "a row with cu_seqlens_padded"
        raise ConfigError(f"{what}; the cloud needs the lengths of the samples, as cu_seqlens only; {_WAY_OUT}")
    values = ends.detach().flatten().tolist()
    is_ascending = all(a <= b for a, b in pairwise(values))
    # Where a row is padded, the last end stands there several times.
    values = values[: values.index(values[-1]) + 1] if values else values
    if not 1 < len(values) <= length or values[0] != 0 or values[-1] >= length or not is_ascending:
        raise ConfigError(
            f"cu_seqlens of the shape {tuple(ends.shape)}; they must count up from 0 to at most {length - 1}, the "
            f"tokens of one row; {_WAY_OUT}"
        )
    return torch.tensor(values + values[-1:] * (length - len(values)), dtype=torch.int32)
