"""The transfers of a plan: packed, checked, and handed to the backend. Nothing leaves a stage by another path."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind, Transfer
from vtp_plugin.plan.boundary.endpoint import Shape
from vtp_plugin.plan.boundary.local_slices import Widths, local_shape, local_slices
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.boundary.portions import Swap, cut_into_portions, swaps
from vtp_plugin.plan.boundary.sharding import LocalBoxes, num_rows
from vtp_plugin.platform.interface import Platform
from vtp_plugin.report.trace.causes import Cause
from vtp_plugin.runtime.comm.audit import Audit, require_allowed
from vtp_plugin.runtime.comm.collectives import StageCollectives
from vtp_plugin.runtime.comm.host_memory import HostMemory
from vtp_plugin.runtime.comm.work import PendingRecv, SendWork, TimedWaits, ranks_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelGroups:
    """Process groups of one channel.

    Attributes:
        messages: point-to-point group of the participants; None on ranks that only take part in collectives.
        stage: tensor-parallel group of this rank's stage, for the start and the finish; None where it has one rank.
        pieces: group of the receiving stage that carries point-to-point messages only. An all-gather is made of such
            messages; None where the backend's all-gather is used.
    """

    messages: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None
    pieces: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """One tensor that crosses, as both sides see it.

    Attributes:
        plan: how it crosses.
        dtype: its type on both sides.
        cargo: what it is.
        position: boundary, direction and number, for error messages.
        peer: who is waited for.
        is_batched: coalesce the messages into one call of the backend.
        in_portions: large messages are cut, so that the ranks of the receiving stage swap what has come while the rest
            is under way.
        widths: length of every unit of the plan's second dimension; None if the plan counts elements.
        memory_order: dimensions of the plan as they are in the memory of tensors and messages, the slowest first; each
            transfer has one box then, and there is no start or finish. None is the plan's own order.
    """

    plan: BoundaryPlan
    dtype: torch.dtype
    cargo: MessageKind
    position: str
    peer: str
    is_batched: bool = False
    in_portions: bool = False
    widths: Widths | None = None
    memory_order: tuple[int, ...] | None = None

    def messages(self, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        """List the messages of some transfers of one rank, in their order.

        What needs none is left out: units that have no length, which both sides know, and a rank's own part.
        """
        found = [one for one in transfers if one.src != one.dst]
        if self.widths is not None:
            found = [one for one in found if any(self.widths[slice(*one.boxes[0][1])])]
        # Whoever does not swap would only pay for more messages.
        has_swaps = self.in_portions and self.plan.finish.kind is CollectiveKind.ALL_GATHER
        return cut_into_portions(found, self._bytes_of) if has_swaps else found

    def as_in_memory(self, piece: torch.Tensor) -> torch.Tensor:
        """View a piece as messages have it."""
        return piece if self.memory_order is None else piece.permute(self.memory_order)

    def swaps_of(self, rank: int) -> tuple[Swap, ...]:
        """Say what a rank passes on in the plan's finish, and when; the same on all ranks of its group."""
        holding = LocalBoxes(rank=rank, boxes=self.plan.dst.boxes_of(rank))
        messages = self.messages(self.plan.receives_of(rank))
        return swaps(messages, lambda box: local_slices(box, holding)[0].start)

    def _bytes_of(self, transfer: Transfer) -> int:
        if self.widths is None:
            return transfer.num_elements * self.dtype.itemsize
        depth = math.prod(stop - start for start, stop in transfer.boxes[0][2:])
        length = sum(self.widths[slice(*transfer.boxes[0][1])])
        return num_rows(transfer.boxes) * length * depth * self.dtype.itemsize


_Message = tuple[Callable[..., "dist.Work | None"], torch.Tensor, int]
"""What the backend does, the memory, and the other rank."""


class Transfers:
    """Posts the messages of one channel's plans.

    Args:
        name: of the channel.
        groups: that carry the messages and the collectives.
        platform: says where tensors are and how to wait.
        waits: times the waits.
        audit: writes down every message; None without ``--vtp-audit``.
    """

    def __init__(
        self, name: str, groups: ChannelGroups, platform: Platform, waits: TimedWaits, audit: Audit | None
    ) -> None:
        self._name = name
        self._group = groups.messages
        self._platform = platform
        self._waits = waits
        self._audit = audit
        self._rank = dist.get_rank()
        self.memory = HostMemory()
        # Not a method: a reference cycle would keep a closed channel's groups until the next garbage collection.
        self._empty = functools.partial(_empty, platform, self.memory)
        self._stage = StageCollectives(name, groups.stage, groups.pieces, waits, self._empty)

    def send(self, tensor: torch.Tensor, parcel: Transmission) -> SendWork:
        """Post the transfers of this rank, after the plan's start inside the stage.

        Args:
            tensor: this rank's part. A contiguous alias is sent, so the caller may replace the tensor's ``data``.
            parcel: what crosses.

        Raises:
            ConfigError: the tensor is not what the cargo allows, or not of the type or shape that the receiver expects.
                (A mismatch in size would end the receiving process inside gloo.)
            PlanError: this rank is not in the group of the channel.
        """
        recorder = self._waits.recorder
        with recorder.span(Cause.PACK, parcel.position):
            messages = self._outgoing(tensor, parcel)
        with recorder.span(Cause.SEND, parcel.position):
            works = self._post(messages, parcel)
        return SendWork(works, [piece for _, piece, _ in messages], self._wait_for(parcel))

    def receive(self, parcel: Transmission) -> PendingRecv:
        """Post the receives of this rank into fresh memory."""
        with self._waits.recorder.span(Cause.POST, parcel.position):
            messages, land = self._incoming(parcel)
            return land(self._post(messages, parcel))

    def exchange(self, tensor: torch.Tensor, parcel: Transmission) -> torch.Tensor:
        """Carry out a plan among ranks of which each may send and receive; all messages go out at once.

        Args:
            tensor: this rank's part; not used if it is no source.
            parcel: what crosses, without start or finish.

        Returns:
            This rank's part of what arrives.
        """
        own = parcel.plan.sends_of(self._rank)
        messages, land = self._incoming(parcel)
        messages += self._outgoing(tensor, parcel) if own else []
        landing = land(self._post(messages, parcel))
        for transfer in own:
            if transfer.dst == self._rank:
                self._keep(tensor, landing.tensor, transfer, parcel)
        return landing.wait()

    def _keep(self, source: torch.Tensor, target: torch.Tensor, transfer: Transfer, parcel: Transmission) -> None:
        """Copy what this rank has already."""
        held, wanted = (
            LocalBoxes(rank=self._rank, boxes=spread.boxes_of(self._rank))
            for spread in (parcel.plan.src, parcel.plan.dst)
        )
        for box in transfer.boxes:
            piece = source[local_slices(box, held, parcel.widths)]
            target[local_slices(box, wanted, parcel.widths)] = piece

    def _outgoing(self, tensor: torch.Tensor, parcel: Transmission) -> list[_Message]:
        """Check a tensor, run the plan's start, and pack what leaves this rank."""
        plan = parcel.plan
        if tensor.dtype != parcel.dtype:
            raise ConfigError(
                f"{parcel.position}: the tensor to send is {tensor.dtype}, the receiver expects {parcel.dtype}; set "
                "the configuration's pipeline_dtype to the type of the stage's output"
            )
        held = LocalBoxes(rank=self._rank, boxes=plan.src.boxes_of(self._rank))
        wanted = local_shape(held, parcel.widths)
        if tuple(tensor.shape) != wanted:
            raise ConfigError(
                f"{parcel.position}: the tensor to send has the shape {tuple(tensor.shape)}, the receiver expects this "
                f"rank's part of {plan.src.shape}, which is {wanted}; return activations [S, B, H] of one "
                "shape from all ranks of the stage, or set variable_seq_lengths"
            )
        local = self._stage.start(plan, tensor.detach(), parcel.position, parcel.widths)
        holding = plan.sent_from(self._rank)
        transfers = parcel.messages(plan.sends_of(self._rank))
        pieces = [
            _packed([parcel.as_in_memory(local[local_slices(box, holding, parcel.widths)]) for box in t.boxes])
            for t in transfers
        ]
        return [(dist.isend, piece, t.dst) for piece, t in zip(pieces, transfers, strict=True)]

    def _incoming(self, parcel: Transmission) -> tuple[list[_Message], Callable[[Sequence[dist.Work]], PendingRecv]]:
        """Allocate what arrives at this rank, and say what to do once its messages are posted."""
        plan, dtype = parcel.plan, parcel.dtype
        held = LocalBoxes(rank=self._rank, boxes=plan.dst.boxes_of(self._rank))
        tensor = self._allocated(local_shape(held, parcel.widths), parcel)
        holding = plan.lands_in(self._rank)
        # An alias: the tensor itself may require a gradient when its memory is filled.
        memory = tensor.detach() if holding == held else self._empty(holding.local_shape, dtype)
        transfers = parcel.messages(plan.receives_of(self._rank))
        buffers: list[torch.Tensor] = []
        copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for transfer in transfers:
            copies.append([])
            targets = [parcel.as_in_memory(memory[local_slices(box, holding, parcel.widths)]) for box in transfer.boxes]
            if len(targets) == 1 and targets[0].is_contiguous():
                buffers.append(targets[0])
                continue
            # Backends take dense memory only: what is not one block of the tensor lands in a buffer first.
            lengths = [len(target) for target in targets]
            buffers.append(self._empty((sum(lengths), *targets[0].shape[1:]), dtype))
            copies[-1] += zip(targets, buffers[-1].split(lengths), strict=True)

        def land(works: Sequence[dist.Work]) -> PendingRecv:
            finish = self._stage.post_finish(plan, memory, tensor.detach(), parcel.position, parcel.swaps_of)
            return PendingRecv(
                tensor=tensor, works=works, copies=copies, finish=finish, wait_for=self._wait_for(parcel)
            )

        return [(dist.irecv, buffer, t.src) for buffer, t in zip(buffers, transfers, strict=True)], land

    def _allocated(self, shape: Shape, parcel: Transmission) -> torch.Tensor:
        """Return uninitialised memory, seen as the plan has it."""
        order = parcel.memory_order
        if order is None:
            return self._empty(shape, parcel.dtype)
        memory = self._empty(tuple(shape[dim] for dim in order), parcel.dtype)
        return memory.permute([order.index(dim) for dim in range(len(order))])

    def warm_up(self, plan: BoundaryPlan, *, is_batched: bool = False) -> None:
        """Send one element along every transfer of a plan, one after another in the plan's order.

        Coalesced messages use a communicator of the whole group, which all its ranks open together: those of a plan go
        out at once then.

        Device backends create a communicator at first use and block the host until both sides have come. Here all ranks
        create them in one order; in the first step they could block each other.
        """
        element = torch.zeros(1, dtype=torch.float32, device=self._platform.device())
        ends = [
            (operation, peer)
            for transfer in plan.transfers
            for operation, end, peer in (
                (dist.isend, transfer.src, transfer.dst),
                (dist.irecv, transfer.dst, transfer.src),
            )
            if self._rank == end
        ]
        for operation, peer in ends[:1] if is_batched else ends:
            peers = [peer for _, peer in ends] if is_batched else [peer]
            parcel = Transmission(
                plan=plan,
                dtype=element.dtype,
                cargo=MessageKind.WARM_UP,
                position=f"{self._name}, warm-up",
                peer=ranks_text(peers),
                is_batched=is_batched,
            )
            # Messages under way at once need memory of their own.
            messages = [(operation, element.clone(), one) for one in peers]
            self._wait_for(parcel)(self._post(messages, parcel))

    def _wait_for(self, parcel: Transmission) -> Callable[[Sequence[dist.Work]], None]:
        return functools.partial(self._waits.wait_for, position=parcel.position, peer=parcel.peer)

    def _post(self, messages: Sequence[_Message], parcel: Transmission) -> list[dist.Work]:
        """Hand messages to the backend. Nothing else does, so what may leave a stage is checked here."""
        if not messages:
            return []
        for operation, tensor, peer in messages:
            require_allowed(parcel.cargo, tensor)
            if self._audit is not None:
                way = "sent" if operation is dist.isend else "received"
                self._audit.note(way, parcel.cargo, tensor, peer, self._name)
        ops = [dist.P2POp(operation, tensor, peer, self._group) for operation, tensor, peer in messages]
        if parcel.is_batched:
            return dist.batch_isend_irecv(ops)
        works = [op.op(op.tensor, op.peer, group=op.group) for op in ops]
        posted = [work for work in works if work is not None]
        if len(posted) != len(works):
            raise PlanError(f"{self._name}: rank {self._rank} has transfers but is not in the channel's group")
        return posted


def _empty(platform: Platform, memory: HostMemory, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    if platform.host_blocking_wait:
        return memory.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=platform.device())


def _packed(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the pieces as one dense tensor; a single one that is dense already is not copied."""
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces))
