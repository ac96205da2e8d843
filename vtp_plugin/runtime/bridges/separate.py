"""A bridge between modules on ranks of their own: how it is opened, and its two channels."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PeerError, PlanError
from vtp_plugin.plan.boundary.bridge_spec import BridgeSpec, unit_widths
from vtp_plugin.plan.boundary.check_boundary import require_valid
from vtp_plugin.plan.boundary.message_kind import Whole
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.bridges.colocated import BatchAxes
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel, RecvWork
from vtp_plugin.runtime.comm.collectives import open_group
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.transfers import Audit, ChannelGroups
from vtp_plugin.runtime.comm.work import OpenSends, SendWork
from vtp_plugin.runtime.health.monitor import Monitor

Cache = MutableMapping[str, "dist.ProcessGroup | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeGroups:
    """Groups of one direction of a bridge; None on ranks that are not in them.

    Attributes:
        spec: the direction, as data.
        messages: group of all ranks of both ends.
        pieces: group of the same ranks, for slices that are swapped by messages; no two ranks do so in both directions.
        gather: group of ranks that swap slices by the backend's all-gather, where these are not a whole replica.
    """

    spec: BridgeSpec
    messages: dist.ProcessGroup | None
    pieces: dist.ProcessGroup | None
    gather: dist.ProcessGroup | None


def open_bridge_groups(
    forward: BridgeSpec, *, cache: Cache, platform: Platform, timeout_s: float
) -> tuple[BridgeGroups, BridgeGroups]:
    """Open the groups of both directions. All ranks of the world call this at the same point.

    Args:
        forward: the direction of activations.
        cache: groups that are open already, by purpose; its owner destroys them.
        platform: says how ranks swap slices.
        timeout_s: limit of every operation, in seconds.

    Raises:
        PlanError: a plan is wrong.
    """

    def group_of(ranks: Sequence[int], what: str) -> dist.ProcessGroup | None:
        key = f"{what}: {list(ranks)}"
        if key not in cache:
            cache[key] = open_group(ranks, platform=platform, timeout_s=timeout_s, description=what)
        return cache[key]

    def groups_of(spec: BridgeSpec) -> BridgeGroups:
        require_valid(spec.probe)
        require_valid(spec.plan_header(spec.header_codec(spec.src.ranks[0]).length))
        # A rank that sends forward receives backward, and finishes are inside an end: no pair sends for two purposes.
        name = spec.name.rpartition(",")[0] if platform.orders_by_peer else spec.name
        messages, gather = group_of(spec.participants, name), None
        for ranks in () if platform.gathers_by_messages else spec.gathering_groups:
            if not any(set(ranks) == set(replica) for replica in spec.dst_end.replicas):
                gather = group_of(ranks, f"{spec.name}, finish") or gather
        pieces = messages if platform.gathers_by_messages else None
        return BridgeGroups(spec=spec, messages=messages, pieces=pieces, gather=gather)

    return groups_of(forward), groups_of(forward.reversed())


def open_bridge(
    groups: Sequence[BridgeGroups],
    *,
    stage_group: dist.ProcessGroup | None,
    platform: Platform,
    monitor: Monitor | None,
    audit: Audit | None,
) -> tuple[Channel, ...]:
    """Open and warm up the channels of a bridge. All ranks of both ends call this at the same point.

    Args:
        groups: groups of both directions.
        stage_group: group of this rank's replica, in which sums and all-gathers among all its ranks run.
        platform: says how to wait.
        monitor: keeps the time.
        audit: records every message.

    Returns:
        The channels of activations and of gradients; nothing on ranks outside the ends.
    """
    channels = tuple(
        Channel(
            one.spec,
            order,
            ChannelGroups(messages=one.messages, stage=one.gather or stage_group, pieces=one.pieces),
            platform,
            monitor,
            audit,
            is_coalesced=coalesces(platform),
        )
        for order, one in enumerate(groups)
        if dist.get_rank() in one.spec.members
    )
    for channel in channels:
        channel.warm_up()
    return channels


def coalesces(platform: Platform) -> bool:
    """Tell whether the messages of a bridge are coalesced: then all of them use one communicator of the backend."""
    return not platform.host_blocking_wait


class Bridge:
    """This rank's end of a bridge.

    Microbatches cross in one order, and gradients come back in the same. A tensor that is sent keeps its memory until
    the backend has sent it, and must not be changed in place before that, as between pipeline stages.

    Args:
        forward: channel of activations.
        backward: channel of gradients.
        axes: order of the axes of the module's tensors.
        dtype: type of all tensors.
        fixed_shape: whole shape of the share of one replica of the source, if it never varies; then no headers cross.
        has_gradient: whether gradients come back.
        agree: compares statements over all ranks of the bridge before anything is sent.
    """

    def __init__(
        self,
        forward: Channel,
        backward: Channel,
        *,
        axes: BatchAxes,
        dtype: torch.dtype,
        fixed_shape: Sequence[int] | None = None,
        has_gradient: bool = True,
        agree: Callable[[Callable[[], Mapping[str, object]]], None],
    ) -> None:
        self._forward, self._backward = forward, backward
        self._axes = axes
        self._has_gradient = has_gradient
        self._agree = agree
        self._is_agreed = False
        self._form = TensorFormat(
            dtype=dtype, has_variable_shapes=True, is_batched=forward.is_coalesced, requires_grad=False
        )
        known = replace(self._form, has_variable_shapes=False)
        # Headers cross where only the sender knows the batch.
        self._with_header, self._without_header = (
            {channel: BoundChannel(channel, form) for channel in (forward, backward)} for form in (self._form, known)
        )
        self.fixed_shape = fixed_shape
        self._opens = OpenSends()
        self._posted: deque[RecvWork] = deque()
        # Batches of which the gradient has not come back.
        self._batches: deque[Whole] = deque()
        # Activations of which the gradient has not been sent.
        self._sent: deque[SendWork] = deque()
        # Receives of gradients whose shape is not known yet.
        self._expected: deque[ExpectedGradient] = deque()
        # Where no gradients cross: zeros for tensors whose gradient Megatron's schedules need.
        self._zeros: deque[torch.Tensor | None] = deque()
        weakref.finalize(self, _drain, self._opens)

    @property
    def has_gradient(self) -> bool:
        """Whether gradients come back."""
        return self._has_gradient

    @has_gradient.setter
    def has_gradient(self, value: bool) -> None:
        """Set it on all ranks of the bridge, before the first message; later it raises ConfigError."""
        if self._is_agreed and value != self._has_gradient:
            raise ConfigError(f"{self._forward.spec.name}: has_gradient is set after the first message; set it before")
        self._has_gradient = value

    @property
    def fixed_shape(self) -> Sequence[int] | None:
        """Whole shape of the share of one replica of the source; None if headers cross."""
        return self._fixed_shape

    @fixed_shape.setter
    def fixed_shape(self, value: Sequence[int] | None) -> None:
        """Set it on all ranks of the bridge, before the first message; later it raises ConfigError."""
        if self._is_agreed:
            raise ConfigError(f"{self._forward.spec.name}: fixed_shape is set after the first message; set it before")
        self._fixed_shape = None if value is None else tuple(value)
        self._fixed = None if value is None else self._fixed_batch(value)

    def send_forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> SendWork:
        """Send this rank's part of an activation.

        Args:
            tensor: this rank's part, with the module's axes.
            sizes: number of tokens of every sample, where samples differ.

        Returns:
            A handle for a caller that waits itself; the bridge also keeps it.

        Raises:
            ConfigError: the tensor is not what the other module expects, or cannot be cut for it.
        """
        batch = self._checked(self._forward, tensor, sizes, self._fixed)
        work = self._send_forward(tensor, batch)
        self._post_expected()
        return work

    def post_forward(self) -> None:
        """Post the receive of the next activation, before the compute that hides it."""
        self._settle(dict)
        self._posted.append(self._bound(self._forward, self._fixed).post(self._fixed))

    def recv_forward(self) -> torch.Tensor:
        """Return the next activation, a fresh leaf: this rank's part, with the module's axes."""
        if not self._posted:
            self.post_forward()
        work = self._posted.popleft()
        tensor = self._axes.from_plan(work.take())
        assert work.transmission is not None
        if not self._batches:
            # All gradients are on their way, and the other module receives them. Waiting frees their
            # memory; over gloo nothing else tells that a message has left.
            self._opens.wait()
        self._note(work.transmission.whole)
        # Also where no gradient goes back: Megatron's schedules ask every input for its gradient.
        return tensor.requires_grad_(torch.is_grad_enabled())

    def send_backward(self, grad: torch.Tensor, sizes: Sequence[int] | None = None) -> SendWork:
        """Send the gradient of the oldest activation that has none yet; otherwise like :meth:`send_forward`."""
        if not self._has_gradient:
            return SendWork((), (), nullcontext)
        known = self._batches.popleft() if self._batches else None
        batch = self._checked(self._backward, grad, sizes, known)
        return self._send(self._bound(self._backward, known), grad, batch)

    def expect_backward(self) -> ExpectedGradient:
        """Post the receive of the next gradient as soon as its shape is known: that of its activation, once sent."""
        expected = ExpectedGradient(self)
        if self._has_gradient:
            self._expected.append(expected)
            self._post_expected()
        return expected

    def post_backward(self) -> RecvWork | None:
        """Post the receive of the next gradient; None if none comes back."""
        if not self._has_gradient:
            return None
        self._settle(dict)
        # A header crosses only if the gradient is not that of an activation: both ends know.
        return self._post_backward(self._batches.popleft() if self._batches else None)

    def take_backward(self, work: RecvWork | None) -> torch.Tensor | None:
        """Return the gradient of a receive; None if none comes back, or zeros if the activation required one."""
        if work is None:
            return self._zeros.popleft() if self._zeros else None
        tensor = self._axes.from_plan(work.take())
        if self._sent:
            # The gradient proves that the activation has come, so this takes no time, and frees the activation.
            self._sent.popleft().wait()
        return tensor

    def exchange_forward(self, tensor: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor | None:
        """Send an activation and receive the gradient of an earlier one, both at once."""
        # The activation may be the first one: whether a gradient has a header depends on what came before.
        batch = self._checked(self._forward, tensor, sizes, self._fixed)
        earlier = self._batches.popleft() if self._batches else None
        self._send_forward(tensor, batch)
        if not self._has_gradient:
            return self.take_backward(None)
        return self.take_backward(self._post_backward(earlier))

    def exchange_backward(self, grad: torch.Tensor, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Send the gradient of an earlier activation and receive the next activation, both at once."""
        if not self._posted:
            self.post_forward()
        self.send_backward(grad, sizes)
        return self.recv_forward()

    def _post_expected(self) -> None:
        while self._expected and self._batches:
            self._expected.popleft().work = self._post_backward(self._batches.popleft())

    def _post_backward(self, known: Whole | None) -> RecvWork:
        return self._bound(self._backward, known).post(known)

    def _note(self, batch: Whole, sent: SendWork | None = None) -> None:
        """Note a batch whose gradient will come back; in evaluation, which has no gradients, none does."""
        if self._has_gradient and torch.is_grad_enabled():
            self._batches.append(batch)
            if sent is not None:
                self._sent.append(sent)

    def _note_zeros(self, tensor: torch.Tensor) -> None:
        if not self._has_gradient and torch.is_grad_enabled():
            zero = torch.zeros((), dtype=tensor.dtype, device=tensor.device)
            self._zeros.append(zero.expand(tensor.shape) if tensor.requires_grad else None)

    def _send_forward(self, tensor: torch.Tensor, batch: Whole) -> SendWork:
        work = self._send(self._bound(self._forward, self._fixed), tensor, batch)
        self._note(batch, work)
        self._note_zeros(tensor)
        return work

    def _bound(self, channel: Channel, known: Whole | None) -> BoundChannel:
        return (self._with_header if known is None else self._without_header)[channel]

    def _send(self, bound: BoundChannel, tensor: torch.Tensor, batch: Whole) -> SendWork:
        return self._opens.add(bound.send(self._axes.to_plan(tensor), batch))

    def _checked(
        self, channel: Channel, tensor: torch.Tensor, sizes: Sequence[int] | None, known: Whole | None
    ) -> Whole:
        """Return the batch that a tensor is a part of, if it may be sent."""
        found: list[Whole] = []
        spec, rank = _spec_of(channel), dist.get_rank()

        def state() -> Mapping[str, object]:
            if tensor.dim() != self._axes.num_dims:
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of shape {tuple(tensor.shape)}, the bridge is for "
                    f"{self._axes.num_dims} dimensions; set tensor_ndim to those of the module's output"
                )
            if tensor.dtype != self._form.dtype:
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of {tensor.dtype}, the bridge is for {self._form.dtype}; set "
                    "comm_dtype to the type of the module's output"
                )
            planned = self._axes.to_plan(tensor)
            shape = spec.local_shape_of(known, rank) if known is not None else tuple(planned.shape)
            if shape != tuple(planned.shape):
                wanted = tuple(self._axes.from_plan(planned.new_empty(0).new_empty(shape)).shape)
                raise ConfigError(
                    f"{channel.spec.name}: a tensor of shape {tuple(tensor.shape)}, expected is {wanted}; give the "
                    "shape of the activation, or with fixed_shape that one"
                )
            found.append(known if known is not None else spec.batch_of(planned.shape, rank, sizes))
            hidden = planned.shape[2] if self._axes.num_dims == 3 else planned.shape[0]
            said = {"dimensions": tensor.dim(), "hidden size": hidden, "sequence length": found[0][0]}
            return said if self._axes.num_dims == 3 else {"hidden size": hidden}

        self._settle(state)
        return found[0]

    def _settle(self, state: Callable[[], Mapping[str, object]]) -> None:
        """Check on all ranks together before the first message; later on this rank alone."""
        if self._is_agreed:
            state()
            return
        known = {"type": str(self._form.dtype), "has_gradient": self._has_gradient, "fixed_shape": self._fixed_shape}
        self._agree(lambda: {**known, **state()})
        self._is_agreed = True

    def _fixed_batch(self, shape: Sequence[int]) -> Whole:
        spec = _spec_of(self._forward)
        if len(shape) != self._axes.num_dims:
            raise ConfigError(f"{spec.name}: fixed_shape {tuple(shape)} does not have {self._axes.num_dims} dimensions")
        rows, length, depth = self._axes.to_plan(torch.empty(tuple(shape), device="meta")).shape
        shares = spec.src.num_replicas // len(spec.src_end.ranks)
        if length % shares:
            raise ConfigError(f"{spec.name}: {length} tokens cannot be cut into {shares} equal parts; see fixed_shape")
        widths = unit_widths(length // shares, spec.num_units // spec.src.num_replicas)
        return (rows, depth, *(widths * spec.src.num_replicas))


class ExpectedGradient:
    """A receive of a gradient, posted once its activation is sent.

    Attributes:
        work: the receive; None before that, and where no gradient crosses.
    """

    def __init__(self, bridge: Bridge) -> None:
        self.work: RecvWork | None = None
        self._bridge = bridge

    def take(self) -> torch.Tensor | None:
        """Wait, and return the gradient; for a frozen encoder None or zeros, see :meth:`Bridge.take_backward`.

        Raises:
            PlanError: the activation was not sent yet.
        """
        if self.work is None and self._bridge.has_gradient:
            raise PlanError("a gradient is waited for before its activation is sent")
        return self._bridge.take_backward(self.work)


def _spec_of(channel: Channel) -> BridgeSpec:
    assert isinstance(channel.spec, BridgeSpec)
    return channel.spec


def _drain(opens: OpenSends) -> None:
    """Wait for the sends under way when a bridge ends: they would be lost with the process."""
    if getattr(sys, "last_value", None) is not None:
        # This process ends by an error: the receiver may be gone.
        return
    with suppress(PeerError):
        opens.wait()
