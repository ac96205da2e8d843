"""Channels: planned transfers of one boundary in one direction, posted first and waited for once.

A channel has its own process group, which carries point-to-point messages only (design section 5, contract 1). The
collectives of a plan run in the stage's own tensor-parallel group: the start when a send is posted, the finish inside
``wait()`` of the receive handle. Every member of the stage posts and waits at the same program point.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.pipeline import ChannelSpec, Shape
from vtp_plugin.boundary.plan import BoundaryPlan, Transfer, local_slices
from vtp_plugin.boundary.spread import Holding
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import HEADER_LENGTH, Audit, require_allowed
from vtp_plugin.runtime.collectives import StageCollectives
from vtp_plugin.runtime.memory import HostMemory
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.work import TimedWaits, _VTPRecvWork, _VTPSendWork, ranks_text

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Channel:
    """One boundary, one direction, one replica. Used from the main thread only.

    Args:
        spec: what crosses between whom.
        order: place among all channels of the run; exchanges post in this order.
        group: point-to-point group of the participants; None on ranks that only take part in collectives.
        stage_group: tensor-parallel group of the own stage, for the start and the finish.
        pieces_group: group of the receiving stage for point-to-point messages only, for an all-gather by messages;
            None where the backend's own is used.
        platform: tells how to wait.
        monitor: keeps the time; None in single-process use.
        audit: writes down every message; None without ``--vtp-audit``.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        order: int,
        group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None,
        pieces_group: dist.ProcessGroup | None,
        platform: Platform,
        monitor: Monitor | None,
        audit: Audit | None = None,
    ) -> None:
        self.spec = spec
        self.order = order
        self._group = group
        self._groups = group, stage_group, pieces_group
        self._monitor = monitor
        self._platform = platform
        self._audit = audit
        self._rank = dist.get_rank()
        self._own_side = spec.src if self._rank in spec.src.ranks else spec.dst
        self._plans: dict[tuple[Shape, bool, bool], BoundaryPlan] = {}
        self._header_plan = spec.plan_header(HEADER_LENGTH)
        self.memory = HostMemory()
        # Not a method: a cycle of references would keep a closed channel's groups until the next garbage collection.
        self._empty = functools.partial(_empty, platform, self.memory)
        self._num_sent = 0
        self._num_received = 0
        self._waits = TimedWaits(platform, monitor)
        self._stage = StageCollectives(spec.name, stage_group, pieces_group, self._waits, self._empty)
        probe = spec.probe
        self.sources = ranks_text({t.src for t in probe.receives_of(self._rank)} or {t.src for t in probe.transfers})
        self.destinations = ranks_text({t.dst for t in probe.sends_of(self._rank)})

    def crossed_by(self, strategy: str, *, unit: str | None = None) -> Channel:
        """Return a channel over the same groups that crosses by another strategy.

        Args:
            strategy: whose ranks are among those of the own one: slices join all ranks that the leaders' way joins.
            unit: what its messages are called; default as before.

        Raises:
            PlanError: the group lacks a rank.
        """
        spec = dataclasses.replace(self.spec, strategy=strategy, unit=unit or self.spec.unit)
        if not set(spec.participants) <= set(self.spec.participants):
            raise PlanError(f"{spec.name}: {strategy} needs the ranks {spec.participants}, which have no group")
        require_valid(spec.probe)
        require_valid(spec.plan_header(HEADER_LENGTH))
        return Channel(spec, self.order, *self._groups, self._platform, self._monitor, self._audit)

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Return the plan for a global shape; planned once per shape. Arguments as for :meth:`ChannelSpec.plan`."""
        key = (shape, src_sharded, dst_sharded)
        if key not in self._plans:
            self._plans[key] = self.spec.plan(shape, src_sharded=src_sharded, dst_sharded=dst_sharded)
        return self._plans[key]

    def whole_shape(self, local: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the whole tensor for the own part `[S, B, ...]`."""
        return self._own_side.whole_shape(local, is_sharded=is_sharded)

    def local_shape(self, whole: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the own part; inverse of :meth:`whole_shape`."""
        return self._own_side.local_shape(whole, is_sharded=is_sharded)

    @property
    def _sending(self) -> str:
        return f"{self.spec.name}, {self.spec.unit} {self._num_sent}"

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_sent = self._num_received = 0

    def post_send(
        self,
        tensor: torch.Tensor,
        plan: BoundaryPlan,
        dtype: torch.dtype,
        *,
        batched: bool = False,
        cargo: Cargo | None = None,
    ) -> _VTPSendWork:
        """Post the transfers of this rank, after the plan's start inside the stage.

        Args:
            tensor: this rank's part. A contiguous alias is sent, so the caller may swap the tensor's ``data``.
            plan: from :meth:`plan`.
            dtype: what the receiver expects.
            batched: coalesce the messages into one call of the backend.
            cargo: what the tensor is; default is what the spec is for.

        Raises:
            ConfigError: the tensor is not what the cargo allows, or not of the type or shape that the receiver expects.
                (A mismatch in size would end the receiving process inside gloo.)
            PlanError: this rank is not in the group of the channel.
        """
        place = self._sending
        self._num_sent += 1
        if tensor.dtype != dtype:
            raise ConfigError(
                f"{place}: the tensor to send is {tensor.dtype}, the receiver expects {dtype}; set the configuration's "
                "pipeline_dtype to the type of the stage's output"
            )
        own = Holding(rank=self._rank, boxes=plan.src.boxes_of(self._rank))
        if tuple(tensor.shape) != own.local_shape:
            raise ConfigError(
                f"{place}: the tensor to send has the shape {tuple(tensor.shape)}, the receiver expects this rank's "
                f"part of {plan.src.shape}, which is {own.local_shape}; return activations [S, B, H] of one shape from "
                "all ranks of the stage, or set variable_seq_lengths"
            )
        local = self._stage.start(plan, tensor.detach(), place)
        holding = plan.sent_from(self._rank)
        transfers = plan.sends_of(self._rank)
        pieces = [_packed([local[local_slices(box, holding)] for box in t.boxes]) for t in transfers]
        works = self._post(dist.isend, pieces, [t.dst for t in transfers], batched, cargo or self.spec.cargo)
        return _VTPSendWork(works, pieces, functools.partial(self._waits.wait_for, place=place, peer=self.destinations))

    def post_recv(
        self,
        plan: BoundaryPlan,
        dtype: torch.dtype,
        *,
        requires_grad: bool = True,
        batched: bool = False,
        cargo: Cargo | None = None,
    ) -> tuple[torch.Tensor, _VTPRecvWork]:
        """Post the receives of this rank and return the fresh local tensor with its handle.

        Args:
            plan: from :meth:`plan`.
            dtype: of the sender's tensor.
            requires_grad: activations and gradients are leaves that autograd needs; headers and weights are not.
            batched: coalesce the messages into one call of the backend.
            cargo: what the tensor is; default is what the spec is for.
        """
        place = f"{self.spec.name}, {self.spec.unit} {self._num_received}"
        self._num_received += 1
        own = Holding(rank=self._rank, boxes=plan.dst.boxes_of(self._rank))
        tensor = self._empty(own.local_shape, dtype)
        holding = plan.lands_in(self._rank)
        # An alias: the tensor itself will require a gradient when its memory is filled.
        landing = tensor.detach() if holding == own else self._empty(holding.local_shape, dtype)
        transfers = plan.receives_of(self._rank)
        buffers: list[torch.Tensor] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for transfer in transfers:
            targets = [landing[local_slices(box, holding)] for box in transfer.boxes]
            if len(targets) == 1 and targets[0].is_contiguous():
                buffers.append(targets[0])
                continue
            # Backends take dense memory only: what is not one piece of the tensor lands beside it first.
            lengths = [len(target) for target in targets]
            buffers.append(self._empty((sum(lengths), *targets[0].shape[1:]), dtype))
            copies += zip(targets, buffers[-1].split(lengths), strict=True)
        works = self._post(dist.irecv, buffers, [t.src for t in transfers], batched, cargo or self.spec.cargo)
        finish = self._stage.post_finish(plan, landing, tensor.detach(), place)
        wait_for = functools.partial(self._waits.wait_for, place=place, peer=self.sources)
        return tensor.requires_grad_(requires_grad), _VTPRecvWork(works, copies, finish, wait_for)

    def post_header_send(self, shape: Shape, dtype: torch.dtype) -> _VTPSendWork:
        """Post shape and type of the tensor that follows: an int64 tensor, never a pickled object.

        Raises:
            ConfigError: the tensor does not have the dimensions `[S, B, H]`.
        """
        if len(shape) != HEADER_LENGTH - 1:
            raise ConfigError(
                f"{self._sending}: the tensor to send has the shape {shape}, not [S, B, H]; return an activation of "
                "three dimensions from the stage"
            )
        header = torch.tensor((*shape, _DTYPES.index(dtype)), dtype=torch.int64, device=self._platform.device())
        work = self.post_send(header, self._header_plan, torch.int64, cargo=Cargo.SHAPE_HEADER)
        self._num_sent -= 1
        return work

    def post_header_recv(self) -> tuple[torch.Tensor, _VTPRecvWork]:
        """Post the receive of a header, for :meth:`read_header`."""
        header, work = self.post_recv(self._header_plan, torch.int64, requires_grad=False, cargo=Cargo.SHAPE_HEADER)
        self._num_received -= 1
        return header, work

    def read_header(self, header: torch.Tensor, dtype: torch.dtype, *, width: int | None = None) -> Shape:
        """Return the whole shape that a received header tells.

        Args:
            header: from :meth:`post_header_recv`, after its wait.
            dtype: that this rank expects.
            width: last dimension that this rank expects, if it knows.

        Raises:
            ConfigError: the tensor that follows is another one; receiving it would end the process inside the backend.
        """
        *shape, code = header.tolist()
        sent = _DTYPES[code] if 0 <= code < len(_DTYPES) else f"type {code}"
        if sent != dtype or min(shape) < 1 or (width is not None and shape[-1] != width):
            place = f"{self.spec.name}, {self.spec.unit} {self._num_received}"
            raise ConfigError(
                f"{place}: {self.sources} would send {sent} {shape}, expected is {dtype} [S, B, {width or 'H'}]; "
                "give all stages one pipeline_dtype and hidden size"
            )
        return tuple(shape)

    def _post(
        self,
        operation: Callable[..., dist.Work | None],
        tensors: list[torch.Tensor],
        peers: list[int],
        batched: bool,
        cargo: Cargo,
    ) -> list[dist.Work]:
        """Hand messages to the backend: the one way out of a stage, so what may leave it is checked here."""
        if not tensors:
            return []
        for tensor, peer in zip(tensors, peers, strict=True):
            require_allowed(cargo, tensor)
            if self._audit is not None:
                way = "sent" if operation is dist.isend else "received"
                self._audit.note(way, cargo, tensor, peer, self.spec.name)
        ops = [dist.P2POp(operation, tensor, peer, self._group) for tensor, peer in zip(tensors, peers, strict=True)]
        if batched:
            return dist.batch_isend_irecv(ops)
        works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]
        posted = [work for work in works if work is not None]
        if len(posted) != len(works):
            raise PlanError(f"{self.spec.name}: rank {self._rank} has transfers but is not in the channel's group")
        return posted

    def warm_up(self) -> None:
        """Send one element along every transfer of the plan, one after another in the plan's order.

        Communicators of device backends are created at first use, and block the host until both sides came; done here,
        in one order on all ranks, they cannot block each other in the first step.
        """
        transfers: tuple[Transfer, ...] = self.spec.probe.transfers
        element = torch.zeros(1, dtype=torch.float32, device=self._platform.device())
        for transfer in transfers:
            if self._rank == transfer.src:
                works = self._post(dist.isend, [element], [transfer.dst], False, Cargo.WARM_UP)
                self._waits.wait_for(works, f"{self.spec.name}, warm-up", f"rank {transfer.dst}")
            elif self._rank == transfer.dst:
                works = self._post(dist.irecv, [element], [transfer.src], False, Cargo.WARM_UP)
                self._waits.wait_for(works, f"{self.spec.name}, warm-up", f"rank {transfer.src}")


def _empty(platform: Platform, memory: HostMemory, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    if platform.host_blocking_wait:
        return memory.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=platform.device())


def _packed(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the pieces as one dense tensor; a single one that is dense already is not copied."""
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces))
