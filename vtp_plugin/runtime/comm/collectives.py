"""Process groups of stages, collectives that pack and unpack what crosses, and the memory for it."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from vtp_plugin.errors import PlanError
from vtp_plugin.plan.boundary.boundary_plan import CollectiveKind, CompiledCollective, CompiledSwaps
from vtp_plugin.plan.boundary.endpoint import even_cuts
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.layout.replica_map import RankShare
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.work import Finish, Timed, TimedWaits, ranks_text
from vtp_plugin.trace.stretches import Cause

Shape = tuple[int, ...]


class HostMemory:
    """Allocates tensors, and reuses their memory once no living tensor shares it.

    On the host only. Its allocator returns large blocks to the system, and touching fresh pages costs about as much as
    receiving into them. Devices have torch's caching allocator, which also knows about tensors on other streams.

    Args:
        platform: where the tensors are.

    Attributes:
        num_allocations: how often fresh memory was needed; constant in the steady state of a run with fixed shapes.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self.num_allocations = 0
        self._blocks: list[tuple[torch.Tensor, torch.UntypedStorage]] = []

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in memory that no living tensor uses."""
        if not self._platform.host_blocking_wait:
            return torch.empty(shape, dtype=dtype, device=self._platform.device())
        for block, storage in self._blocks:
            if block.shape == shape and block.dtype is dtype and _is_free(storage):
                return block.detach()
        # Free memory of other shapes is released: with varying lengths it would pile up.
        self._blocks = [one for one in self._blocks if not _is_free(one[1])]
        block = torch.empty(shape, dtype=dtype)
        self._blocks.append((block, block.untyped_storage()))
        self.num_allocations += 1
        return block.detach()


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Tell whether nobody but this list uses a storage: it holds two references, a tensor's and the storage's."""
    return torch._C._storage_Use_Count(storage._cdata) == 2


_SETTLE_S = 0.1


def open_group(
    ranks: Sequence[int],
    *,
    platform: Platform,
    timeout_s: float,
    description: str,
    buffer_size_bytes: int | None = None,
) -> dist.ProcessGroup | None:
    """Open a process group. Every rank of the world calls this for every planned group, in the plan's order.

    torch names groups by a counter of these calls (since 2.15 also with ``use_local_synchronization``), so a rank that
    skips a call meets the wrong peers in its next one. A call costs a rank that is not a member microseconds: no
    connection, no barrier.

    Args:
        ranks: global ranks of the group's members.
        platform: decides the options; the backend is the world's (a fake one in dry runs).
        timeout_s: limit of every operation, in seconds; torch's own default for a new group is 30 minutes.
        description: shown by torch's debugging tools.
        buffer_size_bytes: size of the largest message, for backends that reserve device memory for each communicator.

    Returns:
        The group; None on ranks that are not members.
    """
    group = dist.new_group(
        ranks=list(ranks),
        timeout=timedelta(seconds=timeout_s),
        pg_options=platform.group_options(buffer_size_bytes),
        group_desc=description,
    )
    return group if isinstance(group, dist.ProcessGroup) else None


def settle(platform: Platform) -> None:
    """Let gloo's threads delete their finished work before a group that ran collectives is destroyed.

    Otherwise this process may wait forever in torch 2.6 and 2.7: docs/development/gloo-dropped-groups.md.
    """
    if platform.host_blocking_wait:
        time.sleep(_SETTLE_S)


def close_groups(groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Destroy process groups; every member does so, in the order in which they were opened, once all has arrived.

    After collectives :func:`settle` comes first; messages need no threads.

    Args:
        groups: groups to destroy; None is skipped, and so is a group that torch has destroyed with the world.
    """
    for group in groups:
        if group is not None and group in _pg_map:
            dist.destroy_process_group(group)


class ModelGroup(dist.ProcessGroup):
    """Reduces over the stages. Each stage counts once, however many cp and dp ranks or copies of experts it has.

    Stock Megatron has one model-parallel group per replica. If one replica of a small stage serves several of a large
    stage, its ranks would have to call such a reduction several times; here all ranks of the world call it once. A sum
    takes one replica of every stage: what is summed over a model-parallel group (squared norms, counts of zeros) is
    equal on the replicas of a stage. Every other reduction takes all ranks. With the distributed optimizer each rank
    holds a different share of these numbers: where each number is held once in the world, a sum takes all ranks.

    The reduction runs inside each stage, then between the leaders of the stages, then a broadcast brings it back. All
    ranks of the world call these three ordinary collectives of ordinary groups in one order, so this group hangs only
    where those would. Its ranks, ``rank`` and ``size`` are those of one replica's group, to which this rank belongs:
    Megatron names optimizer states by that rank, and takes groups of the same ranks for one group. torch does not know
    this class: the caller enters the group where torch looks up backends and ranks.

    Attributes:
        ranks: global ranks that hold each weight once together with this rank.
        shares: group that sums the shares of an optimizer's state; None where nobody asks for it.
    """

    def __init__(
        self,
        share: RankShare,
        *,
        stage_leader: int,
        whole_stage_group: dist.ProcessGroup,
        leaders_group: dist.ProcessGroup | None,
    ) -> None:
        """Join the groups.

        Args:
            share: the ranks that this rank shares one copy of the weights with.
            stage_leader: first global rank of this rank's stage.
            whole_stage_group: group of all ranks of this rank's stage.
            leaders_group: group of the first rank of every stage; None on other ranks.
        """
        self.ranks = share.ranks
        self.shares: ModelGroup | None = None
        join: Any = super().__init__  # torch 2.14 declares another form than it takes
        join(share.index, share.size)
        self._counts = share.replica == 0
        self._leader = stage_leader
        self._whole_stage_group = whole_stage_group
        self._leaders_group = leaders_group

    # torch declares all forms of this method; dist.all_reduce uses this one.
    def allreduce(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensors: Sequence[torch.Tensor], opts: dist.AllreduceOptions
    ) -> dist.Work | None:
        """Reduce one tensor in place; ``dist.all_reduce`` calls this and waits for what it returns."""
        (tensor,) = tensors
        if opts.reduceOp == dist.ReduceOp.SUM and not self._counts:
            tensor.zero_()
        dist.all_reduce(tensor, opts.reduceOp, self._whole_stage_group)
        if self._leaders_group is not None:
            dist.all_reduce(tensor, opts.reduceOp, self._leaders_group)
        return dist.broadcast(tensor, self._leader, self._whole_stage_group, async_op=True)


def open_leaders_group(layout: PipelineLayout, platform: Platform, timeout_s: float) -> dist.ProcessGroup | None:
    """Open the group of the first ranks of all stages; every rank of the world calls this.

    Returns:
        The group; None on ranks that are not members.
    """
    leaders = [layout.leader(stage) for stage in range(layout.num_stages)]
    return open_group(leaders, platform=platform, timeout_s=timeout_s, description="leaders of the stages")


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
        with self._timed("gather", ranks, position, Cause.PACK):
            dist.gather(part, parts, root, self.stage_group)
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
        with self._timed("sum", ranks, position, Cause.PACK):
            dist.all_to_all_single(incoming, outgoing, bytes_taken, splits, self.stage_group)

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
            timed = functools.partial(self._timed, finish.kind, finish.ranks, position)
            return _Swapping(self.name, finish.swaps, tensor, self.pieces_group, timed, self._open_finishes)
        return _AtEnd(functools.partial(self._finish, finish, received, tensor, position))

    def _finish(self, finish: CompiledCollective, received: torch.Tensor, tensor: torch.Tensor, position: str) -> None:
        """Run a collective of the backend; the arguments are those of :meth:`post_finish`."""
        kind, ranks, root, group = finish.kind, finish.ranks, finish.ranks[0], self.stage_group
        with self._timed(kind, ranks, position):
            if kind is CollectiveKind.BROADCAST:
                dist.broadcast(tensor, root, group)
            elif kind is CollectiveKind.SCATTER:
                dist.scatter(tensor, [received[part] for (part,) in finish.parts] or None, root, group)
            elif kind is CollectiveKind.ALL_GATHER:
                _all_gather_rows(tensor, ranks.index(self.rank), len(ranks), group)
            else:
                raise PlanError(f"{position}: finish {kind}: it completes nothing")

    def _timed(
        self, kind: str, ranks: Sequence[int], position: str, cause: Cause = Cause.FINISH
    ) -> AbstractContextManager[None]:
        """Time a collective; the time of a start counts as packing."""
        if self.stage_group is None:
            raise PlanError(f"{position}: {kind} among {ranks_text(ranks)}, but this stage has no group")
        peer = f"the members {ranks_text(ranks)} of this stage"
        return self.waits.timed(position, peer, f"{kind} among {peer}", cause)


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
        timed: Timed,
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
            piece = self._tensor[swap.start : swap.stop]
            with self._timed():
                self._works += [dist.isend(piece, rank, self._group) for rank in self._receivers]

    def complete(self) -> None:
        """Wait until every rank has the whole tensor."""
        self._begin()
        with self._timed():
            for work in self._works:
                assert work is not None
                work.wait()

    def _begin(self) -> None:
        # Messages carry no tags: a channel's finishes must run in the order in which their receives were posted.
        if not self._has_begun and self._open.popleft() is not self._tensor:
            raise PlanError(f"{self._name}: receives are waited for out of order")
        self._has_begun = True


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
