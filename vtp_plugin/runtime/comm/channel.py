"""A channel between two stages: what crosses, with which header, checked against its plan.

A channel: one direction between two endpoints. Tensors come out in the order in which they went in.

A bound channel knows the form of its tensors, and sends and receives them. The channel has what all forms share: whose
connections are used, how a tensor of some shape crosses, the receives under way, and how many tensors have crossed.

Each channel has a process group that carries point-to-point messages only (docs/development/internals.md, contract 3).
The collectives of a plan run in the stage's tensor-parallel group: the start when a send is posted, the finish when a
receive is waited for. Every member of the stage sends, posts and waits at the same program point.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import compile_plan
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.endpoint import Endpoint, Shape
from vtp_plugin.plan.boundary.message_kind import HeaderCodec, MessageKind, Whole
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.collectives import close_groups
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Audit, ChannelGroups, CrossingRecord, Headers, Transfers, Transmission
from vtp_plugin.runtime.comm.work import PendingRecv, Recorder, SendWork, TimedWaits, ranks_text
from vtp_plugin.runtime.health.monitor import Monitor


class BoundChannel:
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
        whole = None if self.shape is None else channel.whole_shape(self.shape, form)
        self._known = None if whole is None else channel.transmission(whole, form)

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self.channel.start_step()

    def post(self, whole: Whole | None = None) -> RecvWork:
        """Post the receive of the next tensor that the other endpoint sends, or of its header.

        Args:
            whole: description of the whole tensor, where it is neither the channel's nor in a header.

        Raises:
            ConfigError: the shape of the tensor is not known.
        """
        channel, form = self.channel, self.form
        known = self._known if whole is None or form.has_variable_shapes else channel.transmission(whole, form)
        if known is None and not form.has_variable_shapes:
            raise ConfigError(f"{channel.spec.name}: the shape of what is received is not known; give it")
        receive = RecvWork(channel, form, known, f"{channel.counted} {channel.num_received}")
        channel.num_received += 1
        channel.receives.add(receive)
        return receive

    def send(self, tensor: torch.Tensor, whole: Whole | None = None) -> SendWork:
        """Send this rank's part of a tensor `[S, B, H]`; it keeps its memory until the send is waited for.

        With variable shapes a header goes before it.

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
            known = channel.transmission(whole or channel.whole_shape(tensor.shape, form), form)
        position = f"{channel.counted} {channel.num_sent}"
        header = channel.headers.announce(known.whole, form, position) if form.has_variable_shapes else None
        channel.num_sent += 1
        work = known.post_sends(tensor, position)
        return work if header is None else header.joined_with(work)


class RecvWork:
    """A receive under way, whether its header has come or not.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point.

    Args:
        channel: channel that the tensor comes over.
        form: type and layout of the tensor.
        transmission: how the tensor crosses; None until its header is read.
        position: boundary, direction and number, for error messages.

    Attributes:
        pending: what is posted; None before that, and once it was waited for.
        is_done: whether the tensor was waited for.
    """

    def __init__(self, channel: Channel, form: TensorFormat, transmission: Transmission | None, position: str) -> None:
        self.form = form
        self.transmission = transmission
        self.position = position
        self.pending: PendingRecv | None = None
        self.is_done = False
        self._channel = channel
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, to be read before :meth:`wait` fills it; with variable shapes this waits for its header."""
        self._channel.receives.read_headers(self)
        if self._tensor is None:
            raise PlanError(f"{self.position}: the tensor was handed out already; read it before wait(), or use take()")
        return self._tensor

    def wait(self) -> None:
        """Return when the tensor holds the local part of what was sent; idempotent.

        What was sent before it on the same channel is waited for first.

        Raises:
            PeerError: the connection to the sender, or to a member of this rank's stage, broke.
            ConfigError: a header does not fit what this rank expects.
        """
        self._channel.receives.finish(self)
        # Megatron keeps handles longer than tensors: the memory must become free as soon as nobody else needs it.
        self._tensor = None

    def take(self) -> torch.Tensor:
        """Wait, and return the tensor: a fresh leaf. May be called once, and not after :meth:`wait`."""
        tensor = self.tensor
        self.wait()
        return tensor

    def post(self, transmission: Transmission) -> None:
        """Post the receive of the tensor; called once, when it is known how it crosses."""
        self.pending = transmission.post_receives(self.position)
        self._tensor = self.pending.tensor.requires_grad_(self.form.requires_grad)

    def post_header(self) -> PendingRecv:
        """Post the receive of the header."""
        return self._channel.headers.expect(self.position)

    def read_header(self, header: PendingRecv) -> None:
        """Wait for the header, which says how the tensor crosses.

        Raises:
            ConfigError: this rank expects another tensor.
        """
        whole = self._channel.headers.read(header.wait(), self.form, self.position)
        self.transmission = self._channel.transmission(whole, self.form)


class Receives:
    """The receives of one channel, and of those beside it over the same groups, the oldest first.

    What comes over one connection is posted in the order in which it was sent. With variable shapes one header is under
    way at a time: when it has come, its tensor is posted, and right behind it what follows, so that both endpoints use
    the connection in one order. Finishes inside the stage run in the order of posting.

    Attributes:
        record: keeps what comes; None unless it is asked for.
    """

    def __init__(self) -> None:
        self.record: CrossingRecord | None = None
        self._waiting: deque[RecvWork] = deque()
        self._unposted: deque[RecvWork] = deque()
        self._header: PendingRecv | None = None

    def add(self, receive: RecvWork) -> None:
        """Post a receive, or its header if none is under way."""
        self._waiting.append(receive)
        self._unposted.append(receive)
        self._post()

    def read_headers(self, receive: RecvWork) -> None:
        """Read headers until a receive is posted, and post what follows each."""
        while receive.pending is None and not receive.is_done:
            header, self._header = self._header, None
            if header is None:
                raise PlanError(f"{receive.position}: no header is under way")
            self._unposted[0].read_header(header)
            self._post()

    def finish(self, receive: RecvWork) -> None:
        """Wait for tensors, the oldest first, until a receive is done."""
        while not receive.is_done:
            oldest = self._waiting[0]
            self.read_headers(oldest)
            self._waiting.popleft()
            pending, oldest.pending, oldest.is_done = oldest.pending, None, True
            assert pending is not None
            tensor = pending.wait()
            if self.record is not None:
                self.record.note(tensor)

    def _post(self) -> None:
        """Post what is not posted, up to the first tensor whose shape is not known: of that one the header."""
        while self._unposted:
            receive = self._unposted[0]
            if receive.transmission is None:
                if self._header is None:
                    self._header = receive.post_header()
                return
            self._unposted.popleft()
            receive.post(receive.transmission)


# Where lengths vary, a run meets so many shapes that it must not keep all their plans.
NUM_PLANS = 256


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
        beside: another channel over the same groups; receives of both are posted in one order.

    Attributes:
        transfers: what all its messages share.
        transmission: gives how a tensor crosses, by the description of the whole and its form; made once for each.
        headers: what crosses before tensors of variable shapes.
        receives: the receives under way, also those of a channel beside it.
        counted: name of the channel, and of the unit in which its messages are counted.
        num_sent: number of tensors that were sent since the start of the step.
        num_received: number of receives that were posted since then.
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
        beside: Channel | None = None,
    ) -> None:
        self.spec = spec
        self.order = order
        self.is_coalesced = is_coalesced
        self._groups = groups
        self._platform = platform
        self._monitor = monitor
        self._audit = audit
        self._recorder = recorder or Recorder(platform)
        rank = dist.get_rank()
        self._is_src = rank in spec.src.ranks
        waits = TimedWaits(platform, monitor, self._recorder)
        self.transfers = transfers = Transfers(spec.name, groups, platform, waits, audit)
        probe = spec.probe
        if self._is_src:
            others = {one.dst for one in probe.sends_of(rank)}
        else:
            others = {one.src for one in probe.receives_of(rank)} or {one.src for one in probe.transfers}
        peer = ranks_text(others)
        # Lengths of units differ more often than shapes.
        plan_of = functools.lru_cache(NUM_PLANS)(spec.plan)

        # Not a method: a reference cycle would keep a closed channel's groups until the next collection.
        @functools.lru_cache(NUM_PLANS)
        def transmission(whole: Whole, form: TensorFormat) -> Transmission:
            shape, widths = spec.crossing(whole)
            plan = plan_of(shape, src_sharded=form.src_sharded, dst_sharded=form.dst_sharded)
            itemsize_bytes = form.dtype.itemsize if platform.gathers_by_messages else None
            return Transmission(
                transfers=transfers,
                whole=whole,
                plan=compile_plan(plan, rank, itemsize_bytes=itemsize_bytes, widths=widths),
                dtype=form.dtype,
                kind=spec.kind,
                peer=peer,
                is_batched=form.is_batched,
            )

        self.transmission = transmission
        self.headers = Headers(spec, rank, peer, self.transfers, platform, is_coalesced=is_coalesced)
        self.receives = Receives() if beside is None else beside.receives
        self.counted = f"{spec.name}, {spec.unit}"
        self.num_sent = self.num_received = 0

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self.num_sent = self.num_received = 0

    @property
    def sends_from_here(self) -> bool:
        """Whether messages leave from this rank itself; another rank of its stage may send them."""
        return bool(self.spec.probe.sends_of(dist.get_rank()))

    def whole_shape(self, local: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape `[S, B, ...]` of the whole tensor, given that of this rank's part."""
        endpoint, is_sharded = self._own_endpoint(form)
        return endpoint.whole_shape(local, is_sharded=is_sharded)

    def local_shape(self, whole: Sequence[int], form: TensorFormat) -> Shape:
        """Return the shape of this rank's part, given that of the whole; inverse of :meth:`whole_shape`."""
        endpoint, is_sharded = self._own_endpoint(form)
        return endpoint.local_shape(whole, is_sharded=is_sharded)

    def _own_endpoint(self, form: TensorFormat) -> tuple[Endpoint, bool]:
        return (self.spec.src, form.src_sharded) if self._is_src else (self.spec.dst, form.dst_sharded)

    def crossed_by(
        self, strategy: str, *, unit: str | None = None, kind: MessageKind | None = None, is_beside: bool = False
    ) -> Channel:
        """Return a channel over the same groups that uses another strategy.

        Args:
            strategy: name of a strategy that needs only ranks of this channel's groups; each row of
                :data:`~vtp_plugin.plan.boundary.strategies.known_strategies.STRATEGIES` needs more ranks and groups
                than the row before.
            unit: what messages are counted in, for error messages; default is this channel's.
            kind: kind of its messages; default is this channel's.
            is_beside: both are used in one step, so that their receives are posted in one order.

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
        known = self._groups, self._platform, self._monitor, self._audit, self._recorder
        return Channel(spec, self.order, *known, is_coalesced=self.is_coalesced, beside=self if is_beside else None)

    def warm_up(self) -> None:
        """Let the backend connect, see :meth:`~vtp_plugin.runtime.comm.transfers.Transfers.warm_up`."""
        self.transfers.warm_up(self.spec.probe, is_batched=self.is_coalesced)

    def close(self) -> None:
        """Destroy the groups that only this channel uses; all ranks of both endpoints call it, once all is received."""
        if not self._platform.host_blocking_wait:
            # The host may be ahead of what it has issued.
            self._platform.module().synchronize()
        close_groups((self._groups.messages, self._groups.pieces))
