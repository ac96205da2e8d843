"""One rank's side of the pipeline: its channels to the previous and the next stage, behind one ``exchange`` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.boundary.pipeline import Direction, PipelineBoundary
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.process_groups import open_group
from vtp_plugin.runtime.transport import Channel, ChannelSpec, Shape, _VTPRecvWork, _VTPSendWork

# Length of a shape header: pipeline tensors are [S, B, H].
_HEADER_SHAPE: Shape = (3,)
Work = _VTPSendWork | _VTPRecvWork


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeOptions:
    """How tensors cross in one schedule; derived from Megatron's model-parallel configuration.

    Attributes:
        dtype: of every tensor that crosses.
        tp_size: of the own stage.
        is_sharded: sequence parallelism: ranks hold slices of dimension 0, not copies.
        has_variable_shapes: a header with the shape crosses before every tensor.
        is_batched: coalesce messages into one call of the backend.
    """

    dtype: torch.dtype
    tp_size: int
    is_sharded: bool
    has_variable_shapes: bool
    is_batched: bool

    def global_shape(self, local: Sequence[int] | None) -> Shape | None:
        """Give the whole tensor's shape for a rank's part ``[S, B, H]``; Megatron cuts S evenly."""
        if local is None:
            return None
        first, *rest = local
        return (first * self.tp_size if self.is_sharded else first, *rest)

    def local_shape(self, whole: Sequence[int]) -> Shape:
        """Give the shape of a rank's part; inverse of :meth:`global_shape`."""
        first, *rest = whole
        return (first // self.tp_size if self.is_sharded else first, *rest)


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
) -> dict[str, Channel]:
    """Open and warm up this rank's channels. All ranks call this with the same specs in the same order.

    Returns:
        The channels of which this rank is a member, by name.
    """
    rank = dist.get_rank()
    channels = {}
    for spec in specs:
        group = open_group(spec.participants, platform=platform, timeout_s=timeout_s, description=spec.name)
        if rank in spec.members:
            assert spec.name not in channels, f"two channels of one rank are called {spec.name}"
            channels[spec.name] = Channel(spec, group, stage_group, platform, monitor)
    for channel in channels.values():
        channel.warm_up()
    return channels


def boundary_specs(boundary: PipelineBoundary) -> list[ChannelSpec]:
    """Give the two channels of a boundary, forward and backward."""
    return [
        ChannelSpec(
            name=boundary.name(direction),
            plan_for=lambda shape, is_sharded, d=direction: boundary.plan(shape, d, is_sharded=is_sharded),
            probe=boundary.plan(_HEADER_SHAPE, direction, is_sharded=False),
        )
        for direction in Direction
    ]


class PipelineCommunicator:
    """Moves activations and gradients between this rank's stage and its neighbours.

    Contract (design section 5): all receives and sends of an exchange are posted before anything is waited for; handles
    are waited for in one fixed order on all ranks of the stage; sends still under way are drained by
    :meth:`finish_step`. Used from the main thread only.
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
        self._open_sends: list[_VTPSendWork] = []

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
        options: ExchangeOptions,
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
            options: of the schedule.
            send_next: activation ``[S, B, H]``, the own part, for the next stage.
            send_prev: gradient for the previous stage.
            recv_prev: take an activation from the previous stage.
            recv_next: take a gradient from the next stage.
            shape: local shape of what is received; ignored with variable shapes.
            wait: return when all is done; otherwise the caller waits for the handles.
        """
        if options.has_variable_shapes:
            prev_shape, next_shape = self.exchange_headers(
                options, send_next=send_next, send_prev=send_prev, recv_prev=recv_prev, recv_next=recv_next
            )
        else:
            prev_shape = next_shape = options.global_shape(shape)
        works: dict[str, Work] = {}
        from_prev = from_next = None
        if recv_prev:
            from_prev, works["recv_prev"] = _receive(self._forward_in, prev_shape, options)
        if recv_next:
            from_next, works["recv_next"] = _receive(self._backward_in, next_shape, options)
        if send_next is not None:
            works["send_next"] = self._send(self._forward_out, send_next, options)
        if send_prev is not None:
            works["send_prev"] = self._send(self._backward_out, send_prev, options)
        if wait:
            for work in works.values():
                work.wait()
            works = {}
        return Exchanged(from_prev=from_prev, from_next=from_next, works=works)

    def _send(self, channel: Channel | None, tensor: torch.Tensor, options: ExchangeOptions) -> _VTPSendWork:
        assert channel is not None, "this stage has no neighbour there"
        plan = channel.plan(_require(options.global_shape(tensor.shape)), is_sharded=options.is_sharded)
        work = channel.post_send(tensor, plan, options.dtype, batched=options.is_batched)
        self._open_sends = [w for w in self._open_sends if not w.is_done] + [work]
        return work

    def exchange_headers(
        self,
        options: ExchangeOptions,
        *,
        send_next: torch.Tensor | None,
        send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Shape | None, Shape | None]:
        """Exchange the global shapes of the tensors that follow; arguments as in :meth:`exchange`.

        Returns:
            Global shapes of what comes from the previous and from the next stage; None where nothing was asked for.
        """
        headers: list[torch.Tensor | None] = [None, None]
        works: list[Work] = []
        for i, (wanted, channel) in enumerate(((recv_prev, self._forward_in), (recv_next, self._backward_in))):
            if wanted:
                assert channel is not None
                headers[i], work = channel.post_header_recv()
                works.append(work)
        for tensor, channel in ((send_next, self._forward_out), (send_prev, self._backward_out)):
            if tensor is not None:
                assert channel is not None
                works.append(channel.post_header_send(_require(options.global_shape(tensor.shape))))
        for work in works:
            work.wait()
        from_prev, from_next = (None if header is None else tuple(header.tolist()) for header in headers)
        return from_prev, from_next


def _receive(
    channel: Channel | None, shape: Shape | None, options: ExchangeOptions
) -> tuple[torch.Tensor, _VTPRecvWork]:
    assert channel is not None, "this stage has no neighbour there"
    plan = channel.plan(_require(shape), is_sharded=options.is_sharded)
    return channel.post_recv(plan, options.dtype, batched=options.is_batched)


def _require(shape: Shape | None) -> Shape:
    assert shape is not None, "the schedule must tell the shape of what is received"
    return shape
