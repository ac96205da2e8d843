"""The transfers of a plan: packed, checked, and given to the backend. Nothing leaves a stage by another path."""

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
        stage: tensor-parallel group of this rank's stage, for the start and the finish; None if it has one rank.
        pieces: group of the receiving stage that carries point-to-point messages only. An all-gather is made of such
            messages; None where the backend's all-gather is used.
    """

    messages: dist.ProcessGroup | None
    stage: dist.ProcessGroup | None
    pieces: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """One tensor that crosses, as sender and receiver see it.

    Attributes:
        plan: plan of the tensor.
        dtype: type of the tensor.
        kind: kind of its messages.
        position: boundary, direction and number, for error messages.
        peer: name of the ranks that are waited for, for error messages.
        is_batched: whether the messages are coalesced into one call of the backend.
        in_portions: whether large messages are cut, so that the ranks of the receiving stage swap what has come while
            the rest is under way.
        widths: length of every unit of the plan's second dimension; None if the plan counts elements.
        memory_order: dimensions of the plan in the order of the tensors' and messages' memory, the slowest first; each
            transfer then has one box, and the plan has no start or finish. None is the plan's own order.
    """

    plan: BoundaryPlan
    dtype: torch.dtype
    kind: MessageKind
    position: str
    peer: str
    is_batched: bool = False
    in_portions: bool = False
    widths: Widths | None = None
    memory_order: tuple[int, ...] | None = None

    def messages(self, transfers: Sequence[Transfer]) -> Sequence[Transfer]:
        """List the messages of some transfers of one rank, in their order.

        Left out are units of length 0, which both endpoints know of, and what a rank would send to itself.
        """
        found = [one for one in transfers if one.src != one.dst]
        if self.widths is not None:
            found = [one for one in found if any(self.widths[slice(*one.boxes[0][1])])]
        # Where ranks do not swap, portions would only cost messages.
        has_swaps = self.in_portions and self.plan.finish.kind is CollectiveKind.ALL_GATHER
        return cut_into_portions(found, self._bytes_of) if has_swaps else found

    def as_in_memory(self, piece: torch.Tensor) -> torch.Tensor:
        """View a piece in the memory order of messages."""
        return piece if self.memory_order is None else piece.permute(self.memory_order)

    def swaps_of(self, rank: int) -> tuple[Swap, ...]:
        """List what a rank passes on in the plan's finish, and after which message; equal on all ranks of its group."""
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
        name: name of the channel, for error messages.
        groups: process groups for the messages and the collectives.
        platform: says on which device tensors are and how to wait.
        waits: times the waits.
        audit: records every message; None without ``--vtp-audit``.
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

    def send(self, tensor: torch.Tensor, transmission: Transmission) -> SendWork:
        """Post the transfers of this rank, after the plan's start inside the stage.

        Args:
            tensor: this rank's part. A contiguous alias is sent, so the caller may replace the tensor's ``data``.
            transmission: plan, type and names of the tensor.

        Raises:
            ConfigError: the tensor does not have the form of its kind of message, or the type or shape that the
                receiver expects. (A mismatch in size would end the receiving process inside gloo.)
            PlanError: this rank is not in the group of the channel.
        """
        recorder = self._waits.recorder
        with recorder.span(Cause.PACK, transmission.position):
            messages = self._outgoing(tensor, transmission)
        with recorder.span(Cause.SEND, transmission.position):
            works = self._post(messages, transmission)
        return SendWork(works, [piece for _, piece, _ in messages], self._wait_for(transmission))

    def receive(self, transmission: Transmission) -> PendingRecv:
        """Post the receives of this rank into fresh memory."""
        with self._waits.recorder.span(Cause.POST, transmission.position):
            messages, make_pending = self._incoming(transmission)
            return make_pending(self._post(messages, transmission))

    def exchange(self, tensor: torch.Tensor, transmission: Transmission) -> torch.Tensor:
        """Carry out a plan among ranks that may all send and receive; all messages are posted at once.

        Args:
            tensor: this rank's part; not used if the rank sends nothing.
            transmission: plan, type and names of the tensor; the plan has no start or finish.

        Returns:
            This rank's part of what arrives.
        """
        own = transmission.plan.sends_of(self._rank)
        messages, make_pending = self._incoming(transmission)
        messages += self._outgoing(tensor, transmission) if own else []
        pending = make_pending(self._post(messages, transmission))
        for transfer in own:
            if transfer.dst == self._rank:
                self._keep(tensor, pending.tensor, transfer, transmission)
        return pending.wait()

    def _keep(self, source: torch.Tensor, target: torch.Tensor, transfer: Transfer, transmission: Transmission) -> None:
        """Copy what this rank sends to itself."""
        held, wanted = (
            LocalBoxes(rank=self._rank, boxes=sharding.boxes_of(self._rank))
            for sharding in (transmission.plan.src, transmission.plan.dst)
        )
        for box in transfer.boxes:
            piece = source[local_slices(box, held, transmission.widths)]
            target[local_slices(box, wanted, transmission.widths)] = piece

    def _outgoing(self, tensor: torch.Tensor, transmission: Transmission) -> list[_Message]:
        """Check a tensor, run the plan's start, and pack the messages that leave this rank."""
        plan = transmission.plan
        if tensor.dtype != transmission.dtype:
            raise ConfigError(
                f"{transmission.position}: the tensor to send is {tensor.dtype}, the receiver expects "
                f"{transmission.dtype}; set the configuration's pipeline_dtype to the type of the stage's output"
            )
        held = LocalBoxes(rank=self._rank, boxes=plan.src.boxes_of(self._rank))
        wanted = local_shape(held, transmission.widths)
        if tuple(tensor.shape) != wanted:
            raise ConfigError(
                f"{transmission.position}: the tensor to send has the shape {tuple(tensor.shape)}, the receiver "
                f"expects this rank's part of {plan.src.shape}, which is {wanted}; return activations [S, B, H] of one "
                "shape from all ranks of the stage, or set variable_seq_lengths"
            )
        local = self._stage.start(plan, tensor.detach(), transmission.position, transmission.widths)
        holding = plan.sent_from(self._rank)
        transfers = transmission.messages(plan.sends_of(self._rank))
        pieces = [
            _packed(
                [transmission.as_in_memory(local[local_slices(box, holding, transmission.widths)]) for box in t.boxes]
            )
            for t in transfers
        ]
        return [(dist.isend, piece, t.dst) for piece, t in zip(pieces, transfers, strict=True)]

    def _incoming(
        self, transmission: Transmission
    ) -> tuple[list[_Message], Callable[[Sequence[dist.Work]], PendingRecv]]:
        """Allocate memory for what arrives at this rank, and return the receives and what makes the pending receive."""
        plan, dtype = transmission.plan, transmission.dtype
        held = LocalBoxes(rank=self._rank, boxes=plan.dst.boxes_of(self._rank))
        tensor = self._allocated(local_shape(held, transmission.widths), transmission)
        holding = plan.lands_in(self._rank)
        # An alias: the tensor itself may require a gradient when its memory is filled.
        memory = tensor.detach() if holding == held else self._empty(holding.local_shape, dtype)
        transfers = transmission.messages(plan.receives_of(self._rank))
        buffers: list[torch.Tensor] = []
        copies: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for transfer in transfers:
            copies.append([])
            targets = [
                transmission.as_in_memory(memory[local_slices(box, holding, transmission.widths)])
                for box in transfer.boxes
            ]
            if len(targets) == 1 and targets[0].is_contiguous():
                buffers.append(targets[0])
                continue
            # Backends take dense memory only: what is not one block of the tensor is received into a buffer first.
            lengths = [len(target) for target in targets]
            buffers.append(self._empty((sum(lengths), *targets[0].shape[1:]), dtype))
            copies[-1] += zip(targets, buffers[-1].split(lengths), strict=True)

        def make_pending(works: Sequence[dist.Work]) -> PendingRecv:
            finish = self._stage.post_finish(
                plan, memory, tensor.detach(), transmission.position, transmission.swaps_of
            )
            return PendingRecv(
                tensor=tensor, works=works, copies=copies, finish=finish, wait_for=self._wait_for(transmission)
            )

        return [(dist.irecv, buffer, t.src) for buffer, t in zip(buffers, transfers, strict=True)], make_pending

    def _allocated(self, shape: Shape, transmission: Transmission) -> torch.Tensor:
        """Return an uninitialised tensor with the dimensions in the plan's order."""
        order = transmission.memory_order
        if order is None:
            return self._empty(shape, transmission.dtype)
        memory = self._empty(tuple(shape[dim] for dim in order), transmission.dtype)
        return memory.permute([order.index(dim) for dim in range(len(order))])

    def warm_up(self, plan: BoundaryPlan, *, is_batched: bool = False) -> None:
        """Send one element along every transfer of a plan, one after another in the plan's order.

        Coalesced messages use a communicator of the whole group, which all its ranks open together: then all transfers
        of the plan are posted at once.

        Device backends create a communicator at first use and block the host until both ranks have come. Here all ranks
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
            transmission = Transmission(
                plan=plan,
                dtype=element.dtype,
                kind=MessageKind.WARM_UP,
                position=f"{self._name}, warm-up",
                peer=ranks_text(peers),
                is_batched=is_batched,
            )
            # Each of several messages under way needs memory of its own.
            messages = [(operation, element.clone(), one) for one in peers]
            self._wait_for(transmission)(self._post(messages, transmission))

    def _wait_for(self, transmission: Transmission) -> Callable[[Sequence[dist.Work]], None]:
        return functools.partial(self._waits.wait_for, position=transmission.position, peer=transmission.peer)

    def _post(self, messages: Sequence[_Message], transmission: Transmission) -> list[dist.Work]:
        """Give messages to the backend. Nothing else does, so what may leave a stage is checked here."""
        if not messages:
            return []
        for operation, tensor, peer in messages:
            require_allowed(transmission.kind, tensor)
            if self._audit is not None:
                way = "sent" if operation is dist.isend else "received"
                self._audit.note(way, transmission.kind, tensor, peer, self._name)
        ops = [dist.P2POp(operation, tensor, peer, self._group) for operation, tensor, peer in messages]
        if transmission.is_batched:
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
    """Return the pieces as one dense tensor; a single piece that is dense already is not copied."""
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces))
