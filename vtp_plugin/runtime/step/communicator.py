"""One rank's part of the pipeline: its channels to the previous and the next stage, behind one ``exchange`` call."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.pipeline_boundaries import PipelineBoundary
from vtp_plugin.plan.layout.channel_id import ChannelId, Direction
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.audit import Audit
from vtp_plugin.runtime.comm.channel import NUM_PLANS, Channel
from vtp_plugin.runtime.comm.link import ChannelLink
from vtp_plugin.runtime.comm.pending_receives import RecvWork
from vtp_plugin.runtime.comm.process_groups import open_group
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import ChannelGroups
from vtp_plugin.runtime.comm.work import OpenSends, SendWork
from vtp_plugin.runtime.health.monitor import Monitor

Work = SendWork | RecvWork
_WAIT_ORDER = ("recv_prev", "recv_next", "send_next", "send_prev")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Result of one exchange.

    Attributes:
        from_prev: activation from the previous stage, a fresh leaf; None if not asked for.
        from_next: gradient from the next stage; None if not asked for.
        works: handles by Megatron's names (``recv_prev``, ``recv_next``, ``send_next``, ``send_prev``), in the order in
            which they must be waited for; empty if the exchange has waited itself.
    """

    from_prev: torch.Tensor | None
    from_next: torch.Tensor | None
    works: dict[str, Work]


def open_channels(
    specs: Sequence[ChannelSpec],
    *,
    stage_group: dist.ProcessGroup | None,
    platform: Platform,
    monitor: Monitor | None,
    timeout_s: float,
    audit: Audit | None = None,
    recorder: Recorder | None = None,
) -> list[Channel | None]:
    """Open and warm up this rank's channels. All ranks call this with the same specs in the same order.

    Returns:
        A channel for every spec of which this rank is a member, None for the others.
    """
    rank = dist.get_rank()
    channels: list[Channel | None] = []
    for order, spec in enumerate(specs):
        group = open_group(
            spec.participants,
            platform=platform,
            timeout_s=timeout_s,
            description=spec.name,
            buffer_size_bytes=spec.largest_message_bytes,
        )
        pieces = None
        for ranks in spec.gathering_groups if platform.gathers_by_messages else ():
            name = f"{spec.name}, finish"
            pieces = open_group(ranks, platform=platform, timeout_s=timeout_s, description=name) or pieces
        groups = ChannelGroups(messages=group, stage=stage_group, pieces=pieces)
        is_member = rank in spec.members
        channels.append(Channel(spec, order, groups, platform, monitor, audit, recorder) if is_member else None)
    for channel in channels:
        if channel is not None:
            channel.warm_up()
    return channels


def own_channels(boundaries: Sequence[PipelineBoundary], opened: Sequence[Channel | None]) -> dict[ChannelId, Channel]:
    """Return this rank's channels by their identity.

    Args:
        boundaries: boundaries of the run.
        opened: a channel for each direction of each boundary, as :func:`open_channels` returns them; more may follow.
    """
    ids = [boundary.id(direction) for boundary in boundaries for direction in Direction]
    return {name: channel for name, channel in zip(ids, opened, strict=False) if channel is not None}


class PipelineCommunicator:
    """Moves activations and gradients between this rank's stage and its neighbours.

    All receives and sends of an exchange are posted before any wait (docs/development/internals.md, contract 5).
    With variable shapes, a tensor's receive is posted when its header has come. Handles are waited for in one fixed
    order on all ranks of the stage. :meth:`finish_step` waits for sends still under way. For the main thread only.
    """

    def __init__(self, channels: Mapping[str, Channel]) -> None:
        """Take the channels by operation (``recv_prev`` ...); without a neighbour there is no entry."""
        # All ranks post in the order of the run's channels. A device that executes its operations strictly in the order
        # of their issue, over all communicators, then finds its peer at the same one; receives first would deadlock it.
        self._channels = dict(sorted(channels.items(), key=lambda pair: pair[1].order))
        # A function, not a method: a reference cycle would keep groups of closed channels until the next collection.
        self._link = functools.lru_cache(NUM_PLANS)(lambda name, form, shape: ChannelLink(channels[name], form, shape))
        self._open_sends = OpenSends()

    def reaches(self, name: str) -> bool:
        """Tell whether there is a neighbour for ``recv_prev``, ``recv_next``, ``send_next`` or ``send_prev``."""
        return name in self._channels

    def channel(self, name: str) -> Channel:
        """Return the channel of ``recv_prev``, ``recv_next``, ``send_next`` or ``send_prev``, which has a neighbour."""
        return self._channels[name]

    def start_step(self) -> None:
        """Begin a pass over the microbatches: finish the sends of the last one, and count from 0 again."""
        self.finish_step()
        for channel in self._channels.values():
            channel.start_step()

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        self._open_sends.wait()

    def exchange(
        self,
        form: TensorFormat,
        *,
        send_next: torch.Tensor | None = None,
        send_prev: torch.Tensor | None = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        shape: Sequence[int] | None = None,
        wait: bool,
    ) -> Exchanged:
        """Send and receive at once.

        Args:
            form: type and layout of all tensors.
            send_next: activation ``[S, B, H]``, this rank's part, for the next stage.
            send_prev: gradient for the previous stage.
            recv_prev: whether to receive an activation from the previous stage.
            recv_next: whether to receive a gradient from the next stage.
            shape: local shape of the tensors to receive; with variable shapes a header brings it.
            wait: whether to return only when the received tensors are there; otherwise the caller waits for the
                handles. Sends are not waited for: the receiver may post only after an exchange with a third rank, which
                may need this one.

        Raises:
            ConfigError: the header of a tensor does not fit what this rank expects, the sequence does not divide, a
                shape is missing, or there is no neighbour.
        """
        tensors = {"send_next": send_next, "send_prev": send_prev}
        wanted = {"recv_prev": recv_prev, "recv_next": recv_next} | {n: t is not None for n, t in tensors.items()}
        for name in wanted:
            if wanted[name] and name not in self._channels:
                raise ConfigError(f"{name}: this stage has no neighbour there; leave it out")
        posted: dict[str, Work] = {}
        received: dict[str, RecvWork] = {}
        for name in self._channels:
            if not wanted[name]:
                continue
            tensor = tensors.get(name)
            local = shape if tensor is None else tensor.shape
            link = self._link(name, form, None if form.has_variable_shapes or local is None else tuple(local))
            if tensor is not None:
                posted[name] = self._open_sends.add(link.send(tensor))
            else:
                posted[name] = received[name] = link.post()
        # One order on all ranks of a stage: a collective completes each receive, that of a header included.
        names = [name for name in _WAIT_ORDER if name in posted]
        arriving = {name: received[name].tensor for name in names if name in received}
        if wait:
            for name in arriving:
                received[name].wait()
        works = {} if wait else {name: posted[name] for name in names}
        return Exchanged(from_prev=arriving.get("recv_prev"), from_next=arriving.get("recv_next"), works=works)


def join_channels(channels: Mapping[ChannelId, Channel], worker: int) -> tuple[PipelineCommunicator, ...]:
    """Make one communicator for every replica of the pipeline that this rank works in.

    Args:
        channels: channels of this rank by their identity.
        worker: number of this rank's replica in the schedule.
    """
    forward = sorted(
        (name for name in channels if name.direction is Direction.FORWARD), key=lambda n: channels[n].order
    )
    befores = [name for name in forward if name.dst == worker]
    afters = [name for name in forward if name.src == worker]
    communicators: list[PipelineCommunicator] = []
    for index in range(math.lcm(len(befores) or 1, len(afters) or 1)):
        ends: dict[str, Channel] = {}
        if befores:
            before = befores[index % len(befores)]
            ends |= {"recv_prev": channels[before], "send_prev": channels[before.opposite]}
        if afters:
            after = afters[index % len(afters)]
            ends |= {"send_next": channels[after], "recv_next": channels[after.opposite]}
        communicators.append(PipelineCommunicator(ends))
    return tuple(communicators)
