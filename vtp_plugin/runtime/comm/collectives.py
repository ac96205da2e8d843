"""Start and finish of a boundary's plan: the collectives inside the sending and the receiving stage."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.boundary_plan import CollectiveKind
from vtp_plugin.plan.boundary.compiled_plan import CompiledCollective, CompiledSwaps
from vtp_plugin.plan.boundary.sharding import even_cuts
from vtp_plugin.report.trace.causes import Cause
from vtp_plugin.runtime.comm.host_memory import HostMemory
from vtp_plugin.runtime.comm.work import Finish, TimedWaits, ranks_text


@dataclass(frozen=True, slots=True, eq=False)
class StageCollectives:
    """Collectives inside this rank's stage for one channel; every member of the stage calls them at one program point.

    Attributes:
        name: name of the channel, for error messages.
        stage_group: tensor-parallel group of this rank's stage; None if the stage has one rank.
        pieces_group: group of the receiving stage that carries point-to-point messages only. An all-gather is made of
            such messages; None where the backend's all-gather is used.
        waits: times the collectives.
        memory: allocates tensors.
        rank: global rank of this process.
    """

    name: str
    stage_group: dist.ProcessGroup | None
    pieces_group: dist.ProcessGroup | None
    waits: TimedWaits
    memory: HostMemory
    rank: int = field(default_factory=dist.get_rank)
    _open_finishes: deque[torch.Tensor] = field(init=False, default_factory=deque)

    def start(self, start: CompiledCollective, tensor: torch.Tensor, position: str) -> torch.Tensor:
        """Run the start of a plan inside the sending stage, and return the tensor that the transfers send from.

        Args:
            start: this rank's part in it.
            tensor: this rank's part of the tensor.
            position: boundary, direction and number, for error messages.
        """
        if start.kind is CollectiveKind.SUM:
            return self._sum(start, tensor, position)
        if start.kind is not CollectiveKind.GATHER:
            raise PlanError(f"{position}: start {start.kind}: only a gather or a sum can come before the transfers")
        ranks, root, parts, whole = start.ranks, start.ranks[0], None, tensor
        if start.joint is not None:
            whole = self.memory.empty(start.joint, tensor.dtype)
            parts = [whole[part] for (part,) in start.parts]
        part = tensor.contiguous()
        self._run("gather", ranks, position, lambda: dist.gather(part, parts, root, self.stage_group), Cause.PACK)
        return whole

    def _sum(self, start: CompiledCollective, tensor: torch.Tensor, position: str) -> torch.Tensor:
        """Add up what this rank will send, in the order of the ranks; the rest of the result is undefined."""
        ranks = start.ranks
        if self.stage_group is None:
            raise PlanError(f"{position}: sum among {ranks_text(ranks)}, but this stage has no group")
        members = dist.get_process_group_ranks(self.stage_group)
        slices_of = dict(zip(ranks, start.parts, strict=True))
        empty = tensor.new_empty(0)
        parts = {rank: [tensor[where].flatten() for where in slices] for rank, slices in slices_of.items()}
        given = {rank: torch.cat(pieces) if pieces else empty for rank, pieces in parts.items()}
        num_own = len(given[self.rank])
        taken = [num_own if rank in ranks else 0 for rank in members]
        arrived = tensor.new_empty(sum(taken))
        self._exchange([given.get(rank, empty) for rank in members], arrived, taken, ranks, position)
        by_rank = dict(zip(members, arrived.split(taken), strict=True))
        total = by_rank[ranks[0]]
        for rank in ranks[1:]:
            total = total + by_rank[rank]
        summed = torch.empty_like(tensor)
        for where in slices_of[self.rank]:
            piece, total = total[: summed[where].numel()], total[summed[where].numel() :]
            summed[where] = piece.view(summed[where].shape)
        return summed

    def _exchange(
        self,
        given: Sequence[torch.Tensor],
        arrived: torch.Tensor,
        taken: Sequence[int],
        ranks: Sequence[int],
        position: str,
    ) -> None:
        """Swap vectors with all members of the stage (an all-to-all); as bytes, since gloo does not know all types."""
        size_bytes = arrived.element_size()
        outgoing = torch.cat(list(given)).view(torch.uint8)
        splits = [len(one) * size_bytes for one in given]
        incoming = arrived.view(torch.uint8)
        bytes_taken = [number * size_bytes for number in taken]
        self._run(
            "sum",
            ranks,
            position,
            lambda: dist.all_to_all_single(incoming, outgoing, bytes_taken, splits, self.stage_group),
            Cause.PACK,
        )

    def post_finish(
        self, finish: CompiledCollective, received: torch.Tensor, tensor: torch.Tensor, position: str
    ) -> Finish:
        """Prepare the finish of a plan inside the receiving stage, which runs as the messages come.

        Args:
            finish: this rank's part in it.
            received: tensor that the transfers fill.
            tensor: tensor to complete: `received` itself, except on the root of a scatter.
            position: boundary, direction and number, for error messages.
        """
        if finish.swaps is not None and self.pieces_group is not None:
            timed = functools.partial(self._run, finish.kind, finish.ranks, position)
            return _Swapping(self.name, finish.swaps, tensor, self.pieces_group, timed, self._open_finishes)
        return _AtEnd(functools.partial(self._finish, finish, received, tensor, position))

    def _finish(self, finish: CompiledCollective, received: torch.Tensor, tensor: torch.Tensor, position: str) -> None:
        """Run a collective of the backend; the arguments are those of :meth:`post_finish`."""
        kind, ranks, root, group = finish.kind, finish.ranks, finish.ranks[0], self.stage_group
        if kind is CollectiveKind.BROADCAST:
            self._run(kind, ranks, position, lambda: dist.broadcast(tensor, root, group))
        elif kind is CollectiveKind.SCATTER:
            parts = [received[part] for (part,) in finish.parts] or None
            self._run(kind, ranks, position, lambda: dist.scatter(tensor, parts, root, group))
        elif kind is CollectiveKind.ALL_GATHER:
            index = ranks.index(self.rank)
            self._run(kind, ranks, position, lambda: _all_gather_rows(tensor, index, len(ranks), group))
        else:
            raise PlanError(f"{position}: finish {kind}: it completes nothing")

    def _run(
        self,
        kind: str,
        ranks: Sequence[int],
        position: str,
        run: Callable[[], object],
        cause: Cause = Cause.FINISH,
    ) -> None:
        """Run a collective and time it; the time of a start counts as packing."""
        if self.stage_group is None:
            raise PlanError(f"{position}: {kind} among {ranks_text(ranks)}, but this stage has no group")
        peer = f"the members {ranks_text(ranks)} of this stage"
        self.waits.run(run, position, peer, f"{kind} among {peer}", cause)


@dataclass(frozen=True, slots=True)
class _AtEnd:
    """A finish that runs when all messages have come."""

    complete: Callable[[], None]

    def advance(self, num_arrived: int) -> None:
        """Do nothing yet."""


class _Swapping:
    """An all-gather by messages: each portion is passed to the other ranks of the stage as soon as it has come.

    The receives are posted before anyone waits, so that no sender ever blocks.
    """

    def __init__(
        self,
        name: str,
        swaps: CompiledSwaps,
        tensor: torch.Tensor,
        group: dist.ProcessGroup,
        timed: Callable[[Callable[[], object]], None],
        open_finishes: deque[torch.Tensor],
    ) -> None:
        """Post the receives: each rank's portions in the order in which that rank gets them."""
        self._name, self._receivers, self._tensor, self._group = name, swaps.receivers, tensor, group
        self._timed, self._open = timed, open_finishes
        self._left = deque(swaps.passed_on)
        self._has_begun = False
        self._works = [dist.irecv(tensor[start:stop], rank, group) for rank, start, stop in swaps.arriving]
        self._open.append(tensor)

    def advance(self, num_arrived: int) -> None:
        """Pass on the rows that are complete after `num_arrived` messages."""
        self._begin()
        while self._left and self._left[0].num_arrived <= num_arrived:
            swap = self._left.popleft()
            self._timed(functools.partial(self._send, self._tensor[swap.start : swap.stop]))

    def complete(self) -> None:
        """Wait until every rank has the whole tensor."""
        self._begin()
        self._timed(self._wait)

    def _begin(self) -> None:
        # Messages carry no tags: a channel's finishes must run in the order in which their receives were posted.
        if not self._has_begun and self._open.popleft() is not self._tensor:
            raise PlanError(f"{self._name}: receives are waited for out of order")
        self._has_begun = True

    def _send(self, piece: torch.Tensor) -> None:
        self._works += [dist.isend(piece, rank, self._group) for rank in self._receivers]

    def _wait(self) -> None:
        for work in self._works:
            assert work is not None
            work.wait()


def _all_gather_rows(tensor: torch.Tensor, index: int, num_ranks: int, group: dist.ProcessGroup | None) -> None:
    """Complete a tensor in place; each rank holds one even cut of the rows.

    Cuts of equal size are gathered straight into the tensor. Others are padded to the largest: backends gather equal
    sizes only.
    """
    cuts = even_cuts(len(tensor), num_ranks)
    start, stop = cuts[index]
    if len(tensor) % num_ranks == 0:
        dist.all_gather_into_tensor(tensor, tensor[start:stop], group)
        return
    longest = cuts[0][1] - cuts[0][0]
    padded = tensor.new_empty((num_ranks * longest, *tensor.shape[1:]))
    own = tensor.new_zeros((longest, *tensor.shape[1:]))
    own[: stop - start] = tensor[start:stop]
    dist.all_gather_into_tensor(padded, own, group)
    for piece, (start, stop) in zip(padded.split(longest), cuts, strict=True):
        tensor[start:stop] = piece[: stop - start]
