"""Companions: tensors of a batch that the cloud of a U-shaped pipeline needs beside the activation.

Attention has to know where the samples of a packed row end, or where the tokens of a picture stand, and only the edge
has data. So a companion crosses before the activation of its microbatch, into every stage of the cloud and over the
same links. There it replaces the data: the script's forward step finds it in its iterator. Activations that cross back
to the edge have no companion, since the edge has the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.plan.schedule.order.actions import Action, Op
from vtp_plugin.plan.schedule.order.messages import channel_of
from vtp_plugin.plan.schedule.order.placement import Placement
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import Channel
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.pending_receives import RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork
from vtp_plugin.runtime.step.batches import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A kind of companion: which tensor of a batch crosses, and in which form.

    Attributes:
        kind: kind of message.
        shape: shape of every companion.
        read: makes the companion, as int32, from what the script's iterator gives.
        give: makes what the script's forward step reads in the cloud from the companion.
        unit: name of what the script reads for a microbatch, such as ``"row"``, for errors.
        says: what the cloud would not know without the companion, for errors.
        way_out: advice for the error about a forward that reads several batches.
    """

    kind: MessageKind
    shape: tuple[int, int, int]
    read: Callable[[Any], torch.Tensor]
    give: Callable[[torch.Tensor], Any]
    unit: str
    says: str
    way_out: str


class Companions:
    """Moves the companions of this rank's microbatches into the cloud; for the main thread only.

    Args:
        placement: which stage holds which virtual stage; stage 0 is the edge.
        stage: stage of this rank.
        channels: channels of this rank by their identity.
        companion: kind of companion that crosses.
        platform: where this rank computes.
    """

    def __init__(
        self,
        placement: Placement,
        stage: int,
        channels: Mapping[ChannelId, Channel],
        companion: Companion,
        platform: Platform,
    ) -> None:
        self._placement = placement
        self._is_edge = stage == 0
        self._companion = companion
        self._platform = platform
        self._channels = {
            name: channel.crossed_by("rank0", unit=f"{companion.kind} of microbatch", kind=companion.kind)
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
            is_batched: whether messages are coalesced into one call of the backend, as those of the activations are.
        """
        form = TensorFormat(dtype=torch.int32, is_batched=is_batched, requires_grad=False)
        self._links = {
            name: ChannelLink(channel, form, self._companion.shape) for name, channel in self._channels.items()
        }
        for link in self._links.values():
            link.start_step()
        self._held.clear()

    def iterators(self, iterators: Sequence[Any]) -> list[Any]:
        """Return the iterators that the script's forward step reads, one for each chunk.

        Args:
            iterators: Megatron's iterators. On the edge they are read as before; a rank that reads nothing has None.
        """
        if not self._is_edge:
            return [Reader(self._given) for _ in iterators]
        return [None if batches is None else Reader(self._watched(batches)) for batches in iterators]

    def post(self, receive: Action) -> None:
        """Post the receive of the companion of an activation, before that of the activation itself."""
        link = self._links.get(channel_of(self._placement, receive))
        if link is not None and receive.op is Op.RECV_F:
            self._posted[receive] = link.post()

    def take(self, receive: Action) -> None:
        """Wait for the companion of an activation."""
        posted = self._posted.pop(receive, None)
        if posted is not None:
            self._held[receive.vstage, receive.microbatch] = posted.take()

    def enter(self, forward: Action) -> None:
        """Note the forward that reads its batch from now on."""
        self._now = forward.vstage, forward.microbatch

    def send(self, send: Action) -> SendWork | None:
        """Send the companion of an activation, before the activation itself; return None if it has no companion."""
        held = self._held.pop((send.vstage, send.microbatch), None)
        link = self._links.get(channel_of(self._placement, send))
        if link is None or send.op is not Op.SEND_F:
            return None
        if held is None:
            if link.channel.sends_from_here:
                unit, says = self._companion.unit, self._companion.says
                raise ConfigError(
                    f"{send}: the script's forward step has read no {unit}, so the cloud would not know {says}; read "
                    f"one {unit} in every forward of the edge"
                )
            held = torch.zeros(self._companion.shape, dtype=torch.int32, device=self._platform.device())
        return link.send(held)

    def _watched(self, batches: Iterator[Any]) -> Callable[[], Any]:
        def read() -> Any:
            batch = next(batches)
            if self._placement.crosses(self._now[0]):
                if self._now in self._held:
                    unit, way_out = self._companion.unit, self._companion.way_out
                    raise ConfigError(f"a forward step that reads two {unit}s; a microbatch is one {unit}; {way_out}")
                made = self._companion.read(batch).view(self._companion.shape)
                self._held[self._now] = made.to(self._platform.device(), non_blocking=True)
            return batch

        return read

    def _given(self) -> Any:
        return self._companion.give(self._held[self._now])
