"""A channel: one direction between two endpoints. Tensors come out in the order in which they went in.

A link (:mod:`vtp_plugin.runtime.step.links`) gives or takes this rank's part of a tensor. The channel decides how the
tensor is cut, whose connections it uses, whether a header with its shape goes first, and in which order all of it is
posted and waited for.

Each channel has a process group that carries point-to-point messages only (docs/internals.md, contract 3). The
collectives of a plan run in the stage's tensor-parallel group: the start when a send is posted, the finish when a
receive is waited for. Every member of the stage sends, posts and waits at the same program point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.endpoint import Shape
from vtp_plugin.plan.boundary.header import HeaderCodec, Whole
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.audit import Audit
from vtp_plugin.runtime.comm.dispatch import Dispatch
from vtp_plugin.runtime.comm.pending_receives import Receives, RecvWork
from vtp_plugin.runtime.comm.process_groups import close_groups
from vtp_plugin.runtime.comm.recorder import Recorder
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import ChannelGroups, Transfers
from vtp_plugin.runtime.comm.work import SendWork, TimedWaits
from vtp_plugin.runtime.health.monitor import Monitor


class Channel:
    """One direction between two endpoints, for the main thread only.

    Args:
        spec: the channel as data: endpoints, strategy, kind of message.
        order: number among all channels of the run; exchanges post in this order.
        groups: process groups for its messages and collectives.
        platform: says how to wait.
        monitor: keeps the time; None in single-process use.
        audit: records every message; None without ``--vtp-audit``.
        recorder: notes how long each part takes; None if nobody listens.
        is_coalesced: whether headers and the warm-up are coalesced, so that one communicator of the backend carries
            all.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        order: int,
        groups: ChannelGroups,
        platform: Platform,
        monitor: Monitor | None,
        audit: Audit | None = None,
        recorder: Recorder | None = None,
        *,
        is_coalesced: bool = False,
    ) -> None:
        self.spec = spec
        self.order = order
        self.is_coalesced = is_coalesced
        self._groups = groups
        self._platform = platform
        self._monitor = monitor
        self._audit = audit
        self._recorder = recorder or Recorder(platform)
        waits = TimedWaits(platform, monitor, self._recorder)
        self._transfers = Transfers(spec.name, groups, platform, waits, audit)
        self._dispatch = Dispatch(spec, self._transfers, platform, is_coalesced=is_coalesced)
        # It has the dispatch only: a reference cycle would keep a closed channel's groups until the next collection.
        self._receives = Receives(self._dispatch)
        self._num_sent = self._num_received = 0

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_sent = self._num_received = 0

    def send(self, tensor: torch.Tensor, whole: Whole, form: TensorFormat) -> SendWork:
        """Send this rank's part of a tensor; with variable shapes a header goes before it.

        Args:
            tensor: this rank's part `[S, B, H]`. It keeps its memory until the work is waited for.
            whole: description of the whole tensor.
            form: type and layout of the tensor, the same at both endpoints.

        Raises:
            ConfigError: the tensor does not have the form of its kind of message, or not what the receiver expects.
        """
        position = f"{self.spec.name}, {self.spec.unit} {self._num_sent}"
        header = self._dispatch.send_header(whole, form, position) if form.has_variable_shapes else None
        self._num_sent += 1
        work = self._dispatch.send(tensor, whole, form, position)
        return work if header is None else header.joined_with(work)

    def post(self, whole: Whole | None, form: TensorFormat) -> RecvWork:
        """Post the receive of the next tensor that the other endpoint sends.

        Args:
            whole: description of the whole tensor; None if its header brings it.
            form: type and layout of the tensor, the same at both endpoints.
        """
        position = f"{self.spec.name}, {self.spec.unit} {self._num_received}"
        self._num_received += 1
        return self._receives.add(whole, form, position)

    @property
    def sends_from_here(self) -> bool:
        """Whether messages leave from this rank itself; another rank of its stage may send them."""
        return bool(self.spec.probe.sends_of(dist.get_rank()))

    @property
    def num_allocations(self) -> int:
        """Number of receives so far that needed fresh host memory; constant in a steady state with fixed shapes."""
        return self._transfers.memory.num_allocations

    def whole_shape(self, local: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape `[S, B, ...]` of the whole tensor, given that of this rank's part."""
        return self._dispatch.whole_shape(local, form)

    def local_shape(self, whole: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape of this rank's part, given that of the whole; inverse of :meth:`whole_shape`."""
        return self._dispatch.local_shape(whole, form)

    def crossed_by(self, strategy: str, *, unit: str | None = None, kind: MessageKind | None = None) -> Channel:
        """Return a channel over the same groups that uses another strategy.

        Args:
            strategy: name of a strategy that needs only ranks of this channel's groups; each row of
                :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES` needs more ranks and groups
                than the row before.
            unit: what messages are counted in, for error messages; default is this channel's.
            kind: kind of its messages; default is this channel's.

        Raises:
            PlanError: the channel's group lacks a rank that the strategy needs.
        """
        spec = dataclasses.replace(
            self.spec, strategy=strategy, unit=unit or self.spec.unit, kind=kind or self.spec.kind
        )
        if not set(spec.participants) <= set(self.spec.participants):
            raise PlanError(f"{spec.name}: {strategy} needs the ranks {spec.participants}, which have no group")
        require_valid(spec.probe)
        require_valid(spec.plan_header(HeaderCodec().length))
        return Channel(spec, self.order, self._groups, self._platform, self._monitor, self._audit, self._recorder)

    def warm_up(self) -> None:
        """Let the backend connect, see :meth:`~vtp_plugin.runtime.comm.transfers.Transfers.warm_up`."""
        self._transfers.warm_up(self.spec.probe, is_batched=self.is_coalesced)

    def close(self) -> None:
        """Destroy the groups that only this channel uses; all ranks of both endpoints call it, once all is received."""
        if not self._platform.host_blocking_wait:
            # The host may be ahead of what it has issued.
            self._platform.module().synchronize()
        close_groups((self._groups.messages, self._groups.pieces))
