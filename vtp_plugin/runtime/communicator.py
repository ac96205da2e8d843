"""One rank's side of the pipeline: its channels to the previous and the next stage, behind one ``exchange`` call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.boundary.channel_spec import ChannelSpec
from vtp_plugin.boundary.pipeline import PipelineBoundary
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.layout.channel import Direction
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import Audit
from vtp_plugin.runtime.channel import Channel, RecvWork, TensorFormat
from vtp_plugin.runtime.messages import ChannelGroups
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.process_groups import open_group
from vtp_plugin.runtime.work import SendWork

Work = SendWork | RecvWork
_WAIT_ORDER = ("recv_prev", "recv_next", "send_next", "send_prev")
# More than the microbatches that a schedule has under way between two stages: waiting for the oldest of so many sends
# cannot deadlock, and keeps a rank that only sends, as in evaluation, from running far ahead.
_MAX_OPEN_SENDS = 256


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
) -> dict[str, Channel]:
    """Open and warm up this rank's channels. All ranks call this with the same specs in the same order.

    Returns:
        The channels of which this rank is a member, by name.
    """
    rank = dist.get_rank()
    channels = {}
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
        if rank in spec.members:
            if spec.name in channels:
                raise PlanError(f"two channels of rank {rank} are called {spec.name}")
            groups = ChannelGroups(messages=group, stage=stage_group, pieces=pieces)
            channels[spec.name] = Channel(spec, order, groups, platform, monitor, audit)
    for channel in channels.values():
        channel.warm_up()
    return channels


class PipelineCommunicator:
    """Moves activations and gradients between this rank's stage and its neighbours.

    Contract (design section 5): all receives and sends of an exchange are posted before anything is waited for (with
    variable shapes a tensor's receive is posted when its header has come); handles are waited for in one fixed order on
    all ranks of the stage; sends still under way are drained by :meth:`finish_step`. Used from the main thread only.
    """

    def __init__(
        self,
        *,
        forward_in: Channel | None,
        forward_out: Channel | None,
        backward_in: Channel | None,
        backward_out: Channel | None,
    ) -> None:
        """Take the channels by what crosses: activations in and out, gradients in (from next) and out (to prev)."""
        self._forward_in = forward_in
        self._forward_out = forward_out
        self._backward_in = backward_in
        self._backward_out = backward_out
        self._open_sends: list[SendWork] = []

    @property
    def num_allocations(self) -> int:
        """How often receives needed fresh memory on the host so far; constant in a steady state with fixed shapes."""
        channels = (self._forward_in, self._forward_out, self._backward_in, self._backward_out)
        return sum(channel.num_allocations for channel in channels if channel is not None)

    def reaches(self, name: str) -> bool:
        """Tell whether there is a neighbour for ``recv_prev``, ``recv_next``, ``send_next`` or ``send_prev``."""
        channels = (self._forward_in, self._backward_in, self._forward_out, self._backward_out)
        return channels[_WAIT_ORDER.index(name)] is not None

    def start_step(self) -> None:
        """Begin a pass over the microbatches: drain the one before, count from 0 for messages about hangs."""
        self.finish_step()
        for channel in (self._forward_in, self._forward_out, self._backward_in, self._backward_out):
            if channel is not None:
                channel.start_step()

    def finish_step(self) -> None:
        """Wait for the sends that nobody waited for."""
        sends, self._open_sends = self._open_sends, []
        for work in sends:
            work.wait()

    def exchange(
        self,
        form: TensorFormat,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        shape: Sequence[int] | None,
        wait: bool,
    ) -> Exchanged:
        """Send and receive at once.

        Args:
            form: of all tensors.
            send_next: activation ``[S, B, H]``, the own part, for the next stage.
            send_prev: gradient for the previous stage.
            recv_prev: take an activation from the previous stage.
            recv_next: take a gradient from the next stage.
            shape: local shape of what is received; with variable shapes it comes with the tensor.
            wait: return when what is received is there; otherwise the caller waits for the handles. Sends are not
                waited for: the receiver may post only after an exchange with a third rank, which may need this one.

        Raises:
            ConfigError: the header of a tensor does not fit what this rank expects, the sequence does not divide, a
                shape is missing, or there is no neighbour.
        """
        posted: dict[str, Work] = {}
        receives: dict[str, RecvWork] = {}
        tensors = {"send_next": send_next, "send_prev": send_prev}
        for name, channel in self._in_order(recv_prev, recv_next, send_next is not None, send_prev is not None):
            tensor = tensors.get(name)
            if tensor is not None:
                posted[name] = self._send(channel, tensor, form)
            elif shape is None and not form.has_variable_shapes:
                raise ConfigError(f"{name}: the shape of what is received is not known; give it")
            else:
                posted[name] = receives[name] = channel.post(form, shape or ())
        # One order on all ranks of a stage: what completes a receive, also that of a header, is a collective.
        names = [name for name in _WAIT_ORDER if name in posted]
        received = {name: receives[name].tensor for name in names if name in receives}
        if wait:
            for name in received:
                receives[name].wait()
        works = {} if wait else {name: posted[name] for name in names}
        return Exchanged(from_prev=received.get("recv_prev"), from_next=received.get("recv_next"), works=works)

    def _in_order(self, *wanted: bool) -> list[tuple[str, Channel]]:
        """Name the operations of an exchange in the order in which they are posted, with their channels.

        All ranks post in the order of the run's channels. A device that executes its operations strictly in the order
        of their issue, over all communicators, then finds its peer at the same one; receives first would deadlock it.

        Args:
            wanted: for each name of _WAIT_ORDER, whether it is a part of the exchange.
        """
        channels = (self._forward_in, self._backward_in, self._forward_out, self._backward_out)
        chosen = []
        for name, channel, is_wanted in zip(_WAIT_ORDER, channels, wanted, strict=True):
            if is_wanted:
                if channel is None:
                    raise ConfigError(f"{name}: this stage has no neighbour there; leave it out")
                chosen.append((name, channel))
        return sorted(chosen, key=lambda pair: pair[1].order)

    def _send(self, channel: Channel, tensor: torch.Tensor, form: TensorFormat) -> SendWork:
        work = channel.send(tensor, form)
        self._open_sends = [w for w in self._open_sends if not w.reap()] + [work]
        if len(self._open_sends) > _MAX_OPEN_SENDS:
            self._open_sends[0].wait()
        return work


def join_channels(
    boundaries: Sequence[PipelineBoundary], stage: int, channels: Mapping[str, Channel]
) -> tuple[PipelineCommunicator, ...]:
    """Make one communicator for every replica of the pipeline that this rank works in.

    Args:
        boundaries: those that this rank has a part in, in the order of the replicas.
        stage: the own one.
        channels: of this rank, by name.
    """
    befores = [b for b in boundaries if b.downstream == stage] or [None]
    afters = [b for b in boundaries if b.upstream == stage] or [None]
    return tuple(
        PipelineCommunicator(
            forward_in=channels[before.name(Direction.FORWARD)] if before else None,
            forward_out=channels[after.name(Direction.FORWARD)] if after else None,
            backward_in=channels[after.name(Direction.BACKWARD)] if after else None,
            backward_out=channels[before.name(Direction.BACKWARD)] if before else None,
        )
        for before, after in (
            (befores[i % len(befores)], afters[i % len(afters)]) for i in range(math.lcm(len(befores), len(afters)))
        )
    )
