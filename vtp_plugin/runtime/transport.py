"""Channels: planned transfers of one boundary in one direction, posted first and waited for once.

A channel has its own process group, which carries point-to-point messages only (design section 5, contract 1). The
finish of a plan, a collective inside the receiving stage, runs in that stage's tensor-parallel group, inside ``wait()``
of the receive handle: every member of the stage waits at the same program point, after all posts of the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.boundary.plan import BoundaryPlan, FinishKind, Transfer, local_slices
from vtp_plugin.boundary.spread import Holding, Spread
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.monitor import Monitor, Wait

Shape = tuple[int, ...]


class _VTPSendWork:
    """A send under way: keeps the tensor and the backend's handles until it is waited for.

    ``wait`` is idempotent: the second wait on a gloo receive or send would block until the timeout.
    """

    def __init__(
        self, channel: Channel, works: Sequence[dist.Work], tensors: Sequence[torch.Tensor], place: str
    ) -> None:
        self._channel = channel
        self._works = list(works)
        self._tensors = list(tensors)
        self._place = place

    @property
    def is_done(self) -> bool:
        """Whether :meth:`wait` has been called, or nothing was sent."""
        return not self._works

    def wait(self) -> None:
        """Return when the tensor may be reused: at once for the host on device backends.

        Raises:
            PeerError: the connection to the receiver broke.
        """
        works, self._works = self._works, []
        if works:
            self._channel.wait_for(works, self._place, self._channel.destinations)
        self._tensors = []


class _VTPRecvWork:
    """A receive under way: the leader's (or every rank's) transfers, then the deferred finish inside the stage.

    All tensor-parallel ranks of the receiving stage own such a handle, also those that receive nothing themselves, and
    wait for it at the same program point.
    """

    def __init__(
        self,
        channel: Channel,
        works: Sequence[dist.Work],
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
        tensor: torch.Tensor,
        plan: BoundaryPlan,
        place: str,
    ) -> None:
        self._channel = channel
        self._works = list(works)
        self._pieces = list(pieces)
        self._tensor = tensor
        self._plan = plan
        self._place = place
        self._done = False

    def wait(self) -> None:
        """Return when the tensor holds the local part of what was sent; idempotent.

        Raises:
            PeerError: the connection to the sender, or to a member of the own stage, broke.
        """
        if self._done:
            return
        self._done = True
        if self._works:
            self._channel.wait_for(self._works, self._place, self._channel.sources)
        for target, piece in self._pieces:
            target.copy_(piece)
        finish = self._plan.finish
        if finish.kind is FinishKind.BROADCAST:
            self._channel.broadcast(self._tensor, finish.root, finish.ranks, self._place)
        else:
            assert finish.kind is FinishKind.NONE, finish
        self._works, self._pieces = [], []


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSpec:
    """What a channel is, as data.

    Attributes:
        name: boundary and direction, such as ``"boundary 0->1, forward"``; it appears in error messages.
        plan_for: gives the plan for a global tensor shape, and whether dimension 0 is sharded over the stage.
        probe: plan for any legal shape; tells which ranks take part.
        unit: what the running number of a message counts, for error messages.
    """

    name: str
    plan_for: Callable[[Shape, bool], BoundaryPlan]
    probe: BoundaryPlan
    unit: str = "microbatch"

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of both stages, in the plan's order; each has the channel."""
        return self.probe.src.ranks + self.probe.dst.ranks

    @property
    def participants(self) -> tuple[int, ...]:
        """Ranks that send or receive a transfer, ascending: the members of the channel's group."""
        return self.probe.participants


class Channel:
    """One boundary, one direction, one replica. Used from the main thread only.

    Args:
        spec: the plan.
        group: point-to-point group of the participants; None on ranks that only take part in the finish.
        stage_group: tensor-parallel group of the own stage, for the finish.
        platform: tells how to wait.
        monitor: keeps the time; None in single-process use.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None,
        platform: Platform,
        monitor: Monitor | None,
    ) -> None:
        self.spec = spec
        self._group = group
        self._stage_group = stage_group
        self._platform = platform
        self._monitor = monitor
        self._rank = dist.get_rank()
        self._plans: dict[tuple[Shape, bool], BoundaryPlan] = {}
        self._num_sent = 0
        self._num_received = 0
        probe = spec.probe
        self.sources = _ranks_text({t.src for t in probe.receives_of(self._rank)} or {t.src for t in probe.transfers})
        self.destinations = _ranks_text({t.dst for t in probe.sends_of(self._rank)})

    def plan(self, shape: Shape, *, is_sharded: bool) -> BoundaryPlan:
        """Return the plan for a global shape; planned once per shape."""
        key = (shape, is_sharded)
        if key not in self._plans:
            self._plans[key] = self.spec.plan_for(shape, is_sharded)
        return self._plans[key]

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_sent = self._num_received = 0

    def post_send(
        self, tensor: torch.Tensor, plan: BoundaryPlan, dtype: torch.dtype, *, batched: bool = False
    ) -> _VTPSendWork:
        """Post the transfers of this rank; returns at once, on ranks without a transfer too.

        Args:
            tensor: this rank's part. A contiguous alias is sent, so the caller may swap the tensor's ``data``.
            plan: from :meth:`plan`.
            dtype: what the receiver expects.
            batched: coalesce the messages into one call of the backend.

        Raises:
            ConfigError: the tensor is not of the type that the receiver expects. (A mismatch in size would end the
                receiving process inside gloo.)
        """
        place = f"{self.spec.name}, {self.spec.unit} {self._num_sent}"
        self._num_sent += 1
        holding = _holding(plan.src, self._rank)
        if tensor.dtype != dtype:
            raise ConfigError(
                f"{place}: the tensor to send is {tensor.dtype}, the receiver expects {dtype}; set the configuration's "
                "pipeline_dtype to the type of the stage's output"
            )
        assert tuple(tensor.shape) == _local_shape(holding), (place, tensor.shape, holding)
        local = tensor.detach()
        transfers = plan.sends_of(self._rank)
        pieces = [local[local_slices(t.box, holding)].contiguous() for t in transfers]
        works = self._post(dist.isend, pieces, [t.dst for t in transfers], batched)
        return _VTPSendWork(self, works, pieces, place)

    def post_recv(
        self, plan: BoundaryPlan, dtype: torch.dtype, *, requires_grad: bool = True, batched: bool = False
    ) -> tuple[torch.Tensor, _VTPRecvWork]:
        """Post the receives of this rank and return the fresh local tensor with its handle.

        Args:
            plan: from :meth:`plan`.
            dtype: of the sender's tensor.
            requires_grad: activations and gradients are leaves that autograd needs; headers and weights are not.
            batched: coalesce the messages into one call of the backend.
        """
        place = f"{self.spec.name}, {self.spec.unit} {self._num_received}"
        self._num_received += 1
        holding = _holding(plan.dst, self._rank)
        tensor = torch.empty(_local_shape(holding), dtype=dtype, device=self._platform.device())
        transfers = plan.receives_of(self._rank)
        buffers, copies = [], []
        for transfer in transfers:
            target = tensor[local_slices(transfer.box, holding)]
            # Backends take dense memory only; a piece in the middle of the tensor lands beside it first.
            buffer = target if target.is_contiguous() else torch.empty_like(target)
            buffers.append(buffer)
            if buffer is not target:
                copies.append((target, buffer))
        works = self._post(dist.irecv, buffers, [t.src for t in transfers], batched)
        work = _VTPRecvWork(self, works, copies, tensor.detach(), plan, place)
        return tensor.requires_grad_(requires_grad), work

    def post_header_send(self, shape: Shape) -> _VTPSendWork:
        """Post the shape of the tensor that follows; a header is an int64 tensor, never a pickled object."""
        header = torch.tensor(shape, dtype=torch.int64, device=self._platform.device())
        plan = self.plan((len(shape),), is_sharded=False)
        work = self.post_send(header, plan, torch.int64)
        self._num_sent -= 1
        return work

    def post_header_recv(self) -> tuple[torch.Tensor, _VTPRecvWork]:
        """Post the receive of a shape ``[3]``."""
        plan = self.plan((3,), is_sharded=False)
        header, work = self.post_recv(plan, torch.int64, requires_grad=False)
        self._num_received -= 1
        return header, work

    def _post(
        self, operation: Callable[..., dist.Work | None], tensors: list[torch.Tensor], peers: list[int], batched: bool
    ) -> list[dist.Work]:
        if not tensors:
            return []
        ops = [dist.P2POp(operation, tensor, peer, self._group) for tensor, peer in zip(tensors, peers, strict=True)]
        if batched:
            return dist.batch_isend_irecv(ops)
        works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]
        assert None not in works, "only members of the channel's group have transfers"
        return [work for work in works if work is not None]

    def wait_for(self, works: Sequence[dist.Work], place: str, peer: str) -> None:
        """Wait for backend handles, timed by the monitor."""
        wait = self._monitor.begin(place, peer) if self._monitor is not None else None
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise PeerError(f"{place}: connection to {peer} broke ({str(error).splitlines()[0]})") from error
        self._end(wait)

    def broadcast(self, tensor: torch.Tensor, root: int | None, ranks: Sequence[int], place: str) -> None:
        """Spread a received tensor from ``root`` over the stage."""
        assert root is not None and self._stage_group is not None
        peer = f"the members {_ranks_text(set(ranks))} of this stage"
        wait = self._monitor.begin(place, peer) if self._monitor is not None else None
        try:
            dist.broadcast(tensor, src=root, group=self._stage_group)
        except RuntimeError as error:
            raise PeerError(f"{place}: broadcast to {peer} broke ({str(error).splitlines()[0]})") from error
        self._end(wait)

    def _end(self, wait: Wait | None) -> None:
        if wait is None:
            return
        if self._platform.host_blocking_wait:
            wait.ended = True
        else:
            event = self._platform.module().Event()
            event.record()
            wait.event = event

    def warm_up(self) -> None:
        """Send one element along every transfer of the plan, one after another in the plan's order.

        Communicators of device backends are created at first use, and block the host until both sides came; done here,
        in one order on all ranks, they cannot block each other in the first step.
        """
        transfers: tuple[Transfer, ...] = self.spec.probe.transfers
        element = torch.zeros(1, dtype=torch.float32, device=self._platform.device())
        for transfer in transfers:
            if self._rank == transfer.src:
                works = self._post(dist.isend, [element], [transfer.dst], False)
                self.wait_for(works, f"{self.spec.name}, warm-up", f"rank {transfer.dst}")
            elif self._rank == transfer.dst:
                works = self._post(dist.irecv, [element], [transfer.src], False)
                self.wait_for(works, f"{self.spec.name}, warm-up", f"rank {transfer.src}")


def _holding(spread: Spread, rank: int) -> Holding:
    return Holding(rank=rank, boxes=spread.boxes_of(rank))


def _local_shape(holding: Holding) -> Shape:
    (box,) = holding.boxes
    return tuple(stop - start for start, stop in box)


def _ranks_text(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in sorted(ranks))
