"""Messages between ranks of two stages, with their headers, checked by an audit.

What may leave a rank over the plugin's channels, and a record of what has left.

Every message between stages passes :func:`require_allowed`, at the one place where channels post to the backend. With
``--vtp-audit FILE`` it is also recorded there, one JSON object on each line.
"""

from __future__ import annotations

import atexit
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CompiledMessage, CompiledPlan, compile_plan
from vtp_plugin.plan.boundary.channel_spec import ChannelSpec
from vtp_plugin.plan.boundary.message_kind import MESSAGE_FORMS, Bound, Expected, MessageKind, Whole
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.collectives import HostMemory, StageCollectives
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import PendingRecv, SendWork, TimedWaits, ranks_text
from vtp_plugin.runtime.health.redaction import LineFile
from vtp_plugin.trace.stretches import Cause


class Headers:
    """Sends and receives the headers of one channel.

    Args:
        spec: the channel as data.
        rank: this rank.
        peer: name of the ranks at the other end.
        transfers: posts the messages.
        platform: says where headers are allocated, and how much memory a tensor may take.
        is_coalesced: whether headers are coalesced into one call of the backend.
    """

    def __init__(
        self, spec: ChannelSpec, rank: int, peer: str, transfers: Transfers, platform: Platform, *, is_coalesced: bool
    ) -> None:
        self._platform = platform
        self._peer = peer
        self._num_ranks = len((spec.src if rank in spec.src.ranks else spec.dst).ranks)
        self._codec = spec.header_codec(rank)
        plan = spec.plan_header(self._codec.length)
        self._shape = plan.src.holdings[0].local_shape
        self._transmission = Transmission(
            transfers=transfers,
            whole=plan.src.shape,
            plan=compile_plan(plan, rank),
            dtype=torch.int64,
            kind=self._codec.kind,
            peer=peer,
            is_batched=is_coalesced,
        )

    def announce(self, whole: Whole, form: TensorFormat, position: str) -> SendWork:
        """Send shape and type of the tensor that follows: an int64 tensor, never a pickled object."""
        values = self._codec.encode(whole, str(form.dtype), position)
        header = torch.tensor(values, dtype=torch.int64, device=self._platform.device())
        return self._transmission.post_sends(header.reshape(self._shape), position)

    def expect(self, position: str) -> PendingRecv:
        """Post the receive of a header."""
        return self._transmission.post_receives(position)

    def read(self, header: torch.Tensor, form: TensorFormat, position: str) -> Whole:
        """Return the description of the tensor that a header announces.

        Raises:
            ConfigError: this rank expects another tensor.
        """
        expected = Expected(
            dtype=str(form.dtype),
            width=form.width,
            position=position,
            sources=self._peer,
            bounds=tuple(self._bounds(form)),
        )
        return self._codec.decode(header.reshape(-1, self._codec.length).tolist(), expected)

    def _bounds(self, form: TensorFormat) -> Iterator[Bound]:
        if form.most_tokens is not None and form.width is not None:
            why = "the lengths and the micro batch size of this rank's arguments; raise --max-position-embeddings"
            yield Bound(most=form.most_tokens * form.width, why=why)
        # At worst one rank of this endpoint gets as much as all of them may get together.
        why = f"what {self._num_ranks} of this rank's devices hold; look for a rank that sends another tensor"
        yield Bound(most=self._num_ranks * self._memory_bytes // form.dtype.itemsize, why=why)

    @functools.cached_property
    def _memory_bytes(self) -> int:
        return self._platform.memory_bytes()


def require_allowed(kind: MessageKind, tensor: torch.Tensor) -> None:
    """Refuse to send a tensor that does not have the form of its kind of message.

    Token ids and labels are integers; loss masks and positions have no hidden dimension. So none of them passes for an
    activation or a gradient.

    >>> require_allowed(MessageKind.ACTIVATION, torch.zeros(8, 2, 4))
    >>> require_allowed(MessageKind.ACTIVATION, torch.zeros(8, 2, 4, dtype=torch.int64))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    vtp_plugin.errors.ConfigError: a torch.int64 tensor of shape (8, 2, 4) is no activation, and nothing else may ...

    Raises:
        ConfigError: the tensor has another form.
    """
    form, lengths = MESSAGE_FORMS[kind], (*tensor.shape,)
    dtype = "floating point" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
    # Where any length may be, the tensor's own is.
    wanted = [length if own is None else own for own, length in zip(form.shape or lengths, lengths, strict=False)]
    has_shape = len(form.shape or lengths) == len(lengths) and wanted == [*lengths]
    if dtype != form.dtype or not has_shape or form.num_elements not in (None, tensor.numel()):
        raise ConfigError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} is no {kind}, and nothing else may leave this "
            "rank here; return an activation [S, B, H] from the stage"
        )


def audit_path(path: str, rank: int) -> Path:
    """Return the path of one rank's file.

    >>> str(audit_path("logs/audit.jsonl", 3))
    'logs/audit.rank3.jsonl'
    """
    whole = Path(path)
    return whole.with_name(f"{whole.stem}.rank{rank}{whole.suffix}")


class Audit:
    """Record of the messages that this rank exchanged with other stages.

    A line is written when its message is posted, so the record of a run that is killed is complete up to there. Totals
    of every kind of message follow at the end. Lines are appended to an existing file.

    Args:
        path: path that the user gave; the rank's number is put into the file's name.
        rank: this rank.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int) -> None:
        self._file = LineFile(audit_path(path, rank), option=f"--vtp-audit {path}", is_continued=True)
        self._num_messages: Counter[tuple[str, MessageKind]] = Counter()
        self._num_bytes: Counter[tuple[str, MessageKind]] = Counter()
        atexit.register(self.close)

    def note(self, way: str, kind: MessageKind, tensor: torch.Tensor, peer: int, position: str) -> None:
        """Record one message.

        Args:
            way: ``"sent"`` or ``"received"``.
            kind: kind of the message.
            tensor: memory that is sent, or that will be filled.
            peer: global rank that receives or sends it.
            position: boundary and direction.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        self._num_messages[way, kind] += 1
        self._num_bytes[way, kind] += num_bytes
        self._file.write(
            {
                "way": way,
                "cargo": kind,
                "peer": peer,
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "bytes": num_bytes,
                "place": position,
            }
        )

    def close(self) -> None:
        """Write the totals and close the file; idempotent."""
        atexit.unregister(self.close)
        if self._file.is_closed:
            return
        for (way, kind), count in sorted(self._num_messages.items()):
            self._file.write({"total": kind, "way": way, "messages": count, "bytes": self._num_bytes[way, kind]})
        self._file.close()


class CrossingRecord:
    """Keeps the first activations that came from the edge, for ``leak``: numpy files in fp32, ``[S, B, H]`` each.

    Args:
        folder: folder of the files; it is made.
        rank: this rank, which the names begin with.

    Raises:
        ConfigError: the folder cannot be made.
    """

    MOST = 256

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank, self._number = Path(folder), rank, 0
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--vtp-record-crossing {folder}: {error.strerror}; name another folder") from None

    def note(self, tensor: torch.Tensor) -> None:
        """Keep an activation, unless there are enough."""
        if self._number < self.MOST and tensor.is_floating_point():
            np.save(self._folder / f"rank{self._rank}-{self._number:03}.npy", tensor.detach().float().cpu().numpy())
            self._number += 1


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


_Message = tuple[Callable[..., Any], torch.Tensor, int]
"""What the backend does, the memory, and the other rank."""


class Transfers:
    """What all messages of a channel share: groups, memory, waits, and the record of what has left.

    Args:
        name: name of the channel, for error messages.
        groups: process groups for the messages and the collectives.
        platform: says on which device tensors are and how to wait.
        waits: times the waits.
        audit: records every message; None without ``--vtp-audit``.

    Attributes:
        memory: allocates what messages fill.
        stage: collectives inside this rank's stage.
    """

    def __init__(
        self, name: str, groups: ChannelGroups, platform: Platform, waits: TimedWaits, audit: Audit | None
    ) -> None:
        self.name = name
        self.waits = waits
        self.rank = dist.get_rank()
        self.memory = HostMemory(platform)
        self.stage = StageCollectives(name, groups.stage, groups.pieces, waits, self.memory)
        self._group = groups.messages
        self._platform = platform
        self._audit = audit

    def post(self, messages: Sequence[_Message], kind: MessageKind, *, is_batched: bool) -> list[dist.Work]:
        """Give messages to the backend. Nothing else does, so what may leave a stage is checked here.

        Raises:
            ConfigError: a tensor does not have the form of its kind of message.
            PlanError: this rank is not in the group of the channel.
        """
        if not messages:
            return []
        if self._group is None:
            raise PlanError(f"{self.name}: rank {self.rank} has transfers but is not in the channel's group")
        for operation, tensor, peer in messages:
            require_allowed(kind, tensor)
            if self._audit is not None:
                self._audit.note("sent" if operation is dist.isend else "received", kind, tensor, peer, self.name)
        if self.waits.recorder.counts_traffic:
            self.waits.recorder.add_bytes(tensor for _, tensor, _ in messages)
        if is_batched:
            return dist.batch_isend_irecv([dist.P2POp(*message, self._group) for message in messages])
        return [operation(tensor, peer, group=self._group) for operation, tensor, peer in messages]

    def warm_up(self, plan: BoundaryPlan, *, is_batched: bool = False) -> None:
        """Send one element along every transfer of a plan, one after another in the plan's order.

        Coalesced messages use a communicator of the whole group, which all its ranks open together: then all transfers
        of the plan are posted at once.

        Device backends create a communicator at first use and block the host until both ranks have come. Here all ranks
        create them in one order; in the first step they could block each other.
        """
        element = torch.zeros(1, dtype=torch.float32, device=self._platform.device())
        # Of a rank at both ends, too: all sends first could let ranks wait for each other in a ring.
        ends = [
            (operation, peer)
            for transfer in plan.transfers
            for operation, end, peer in (
                (dist.isend, transfer.src, transfer.dst),
                (dist.irecv, transfer.dst, transfer.src),
            )
            if self.rank == end
        ]
        for operation, peer in ends[:1] if is_batched else ends:
            peers = [peer for _, peer in ends] if is_batched else [peer]
            # Each of several messages under way needs memory of its own.
            messages = [(operation, element.clone(), one) for one in peers]
            works = self.post(messages, MessageKind.WARM_UP, is_batched=is_batched)
            with self.waits.timed(f"{self.name}, warm-up", ranks_text(peers)):
                for work in works:
                    work.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transmission:
    """How tensors of one shape and type cross, as this rank sees it; made once, and lets all of them cross.

    A compiled plan knows neither the type of its tensors nor a channel.

    Attributes:
        transfers: what all messages of the channel share.
        whole: description of the whole tensor.
        plan: this rank's part of the plan.
        dtype: type of the tensors.
        kind: kind of their messages.
        peer: name of the ranks that are waited for, for error messages.
        is_batched: whether the messages of a tensor are coalesced into one call of the backend.
    """

    transfers: Transfers
    whole: Whole
    plan: CompiledPlan
    dtype: torch.dtype
    kind: MessageKind
    peer: str
    is_batched: bool = False

    def post_sends(self, tensor: torch.Tensor, position: str) -> SendWork:
        """Post the messages of this rank, after the plan's start inside the stage.

        Args:
            tensor: this rank's part. A contiguous alias is sent, so the caller may replace the tensor's ``data``.
            position: boundary, direction and number, for error messages.

        Raises:
            ConfigError: the tensor does not have the form of its kind of message, or the type or shape that the
                receiver expects. (A mismatch in size would end the receiving process inside gloo.)
            PlanError: this rank is not in the group of the channel.
        """
        waits = self.transfers.waits
        with waits.recorder.span(Cause.PACK, position):
            messages = self._outgoing(tensor, position)
        with waits.recorder.span(Cause.SEND, position):
            works = self.transfers.post(messages, self.kind, is_batched=self.is_batched)
        return SendWork(works, [piece for _, piece, _ in messages], partial(waits.timed, position, self.peer))

    def post_receives(self, position: str) -> PendingRecv:
        """Post the receives of this rank into fresh memory."""
        waits, finish, finisher = self.transfers.waits, None, self.plan.finish
        with waits.recorder.span(Cause.POST, position):
            tensor, memory, messages, copies = self._allocate(position)
            works = self.transfers.post(messages, self.kind, is_batched=self.is_batched)
            if finisher is not None:
                finish = self.transfers.stage.post_finish(finisher, memory, tensor.detach(), position)
        timed = partial(waits.timed, position, self.peer)
        return PendingRecv(tensor=tensor, works=works, copies=copies, finish=finish, timed=timed)

    def exchange(self, tensor: torch.Tensor, position: str) -> torch.Tensor:
        """Carry out a plan among ranks that may all send and receive; all messages are posted at once.

        Args:
            tensor: this rank's part; not used if the rank sends nothing. The plan has neither a start nor a finish.
            position: name of the exchange, for error messages.

        Returns:
            This rank's part of what arrives.
        """
        arriving, _, messages, copies = self._allocate(position)
        if self.plan.sends or self.plan.kept:
            messages += self._outgoing(tensor, position)
        works = self.transfers.post(messages, self.kind, is_batched=self.is_batched)
        for before, after in self.plan.kept:
            arriving[after] = tensor[before]
        timed = partial(self.transfers.waits.timed, position, self.peer)
        return PendingRecv(tensor=arriving, works=works, copies=copies, finish=None, timed=timed).wait()

    def _outgoing(self, tensor: torch.Tensor, position: str) -> list[_Message]:
        """Check a tensor, run the plan's start, and pack the messages that leave this rank."""
        plan = self.plan
        if tensor.dtype != self.dtype:
            raise ConfigError(
                f"{position}: the tensor to send is {tensor.dtype}, the receiver expects {self.dtype}; set the "
                "configuration's pipeline_dtype to the type of the stage's output"
            )
        if tensor.shape != plan.held:
            raise ConfigError(
                f"{position}: the tensor to send has the shape {tuple(tensor.shape)}, the receiver expects this rank's "
                f"part of {plan.whole}, which is {plan.held}; return activations [S, B, H] of one shape from all ranks "
                "of the stage, or set variable_seq_lengths"
            )
        local = tensor.detach()
        if plan.start is not None:
            local = self.transfers.stage.start(plan.start, local, position)
        messages: list[_Message] = []
        for one in plan.sends:
            pieces = _pieces(local, one, plan)
            # A single piece that is dense already is not copied.
            messages.append((dist.isend, pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces), one.peer))
        return messages

    def _allocate(
        self, position: str
    ) -> tuple[torch.Tensor, torch.Tensor, list[_Message], list[Sequence[tuple[torch.Tensor, torch.Tensor]]]]:
        """Allocate memory for what arrives at this rank.

        Returns:
            This rank's part; what the messages fill, which is the same memory, but on the root of a scatter; the
            messages to receive; and for each pairs of a part of the memory and the dense buffer it is copied from.
        """
        plan, dtype, empty = self.plan, self.dtype, self.transfers.memory.empty
        if plan.wanted is None:
            raise PlanError(f"{position}: rank {self.transfers.rank} gets nothing of it")
        order = plan.memory_order
        if order is None:
            tensor = empty(plan.wanted, dtype)
        else:
            dense = empty(tuple(plan.wanted[dim] for dim in order), dtype)
            tensor = dense.permute([order.index(dim) for dim in range(len(order))])
        joint = None if plan.finish is None else plan.finish.joint
        # An alias: the tensor itself may require a gradient when its memory is filled.
        memory = tensor.detach() if joint is None else empty(joint, dtype)
        messages: list[_Message] = []
        copies: list[Sequence[tuple[torch.Tensor, torch.Tensor]]] = []
        for one in plan.receives:
            targets = _pieces(memory, one, plan)
            buffer = targets[0] if one.buffer is None else empty(one.buffer, dtype)
            messages.append((dist.irecv, buffer, one.peer))
            copies.append(() if one.buffer is None else [*zip(targets, buffer.split(one.lengths), strict=True)])
        return tensor, memory, messages, copies


def _pieces(tensor: torch.Tensor, message: CompiledMessage, plan: CompiledPlan) -> list[torch.Tensor]:
    """View the parts of a tensor that a message consists of, in the memory order of messages."""
    pieces = [tensor[part] for part in message.parts] or [tensor]
    return pieces if plan.memory_order is None else [piece.permute(plan.memory_order) for piece in pieces]
