"""Channels: planned transfers of one boundary in one direction, posted first and waited for once.

A channel has its own process group, which carries point-to-point messages only (design section 5, contract 1). The
collectives of a plan run in the stage's own tensor-parallel group: the start when a send is posted, the finish inside
``wait()`` of the receive handle. Every member of the stage posts and waits at the same program point.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.pipeline import Crossing, Shape
from vtp_plugin.boundary.plan import BoundaryPlan, CollectiveKind, Transfer, local_slices
from vtp_plugin.boundary.spread import Holding, even_cuts
from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import HEADER_LENGTH, Audit, require_allowed
from vtp_plugin.runtime.memory import HostMemory
from vtp_plugin.runtime.monitor import Monitor, Wait

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


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
        """Whether there is nothing to wait for: it was waited for, or this rank sends nothing."""
        return not self._works

    def reap(self) -> bool:
        """Let go of the tensor if all is sent; tell whether it is. Never blocks.

        Gloo's handles of messages do not know before they are waited for, so there only an earlier wait counts.
        """
        if self._works and all(work.is_completed() for work in self._works):
            self.wait()
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
    """A receive under way: the own transfers, then the deferred finish inside the stage.

    All tensor-parallel ranks of the receiving stage own such a handle, also those that receive nothing themselves, and
    wait for it at the same program point.
    """

    def __init__(
        self,
        channel: Channel,
        works: Sequence[dist.Work],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        finish: Callable[[], None],
        place: str,
    ) -> None:
        self._channel = channel
        self._works = list(works)
        self._copies = list(copies)
        self._finish: Callable[[], None] | None = finish
        self._place = place

    @property
    def is_done(self) -> bool:
        """Whether it was waited for."""
        return self._finish is None

    def wait(self) -> None:
        """Return when the tensor holds the local part of what was sent; idempotent.

        Raises:
            PeerError: the connection to the sender, or to a member of the own stage, broke.
        """
        finish, self._finish = self._finish, None
        if finish is None:
            return
        if self._works:
            self._channel.wait_for(self._works, self._place, self._channel.sources)
        for target, piece in self._copies:
            target.copy_(piece)
        finish()
        self._works, self._copies = [], []


class Channel:
    """One boundary, one direction, one replica. Used from the main thread only.

    Args:
        crossing: what crosses between whom.
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
        crossing: Crossing,
        order: int,
        group: dist.ProcessGroup | None,
        stage_group: dist.ProcessGroup | None,
        pieces_group: dist.ProcessGroup | None,
        platform: Platform,
        monitor: Monitor | None,
        audit: Audit | None = None,
    ) -> None:
        self.crossing = crossing
        self.order = order
        self._group = group
        self._stage_group = stage_group
        self._pieces_group = pieces_group
        self._platform = platform
        self._monitor = monitor
        self._audit = audit
        self._rank = dist.get_rank()
        self._own_side = crossing.src if self._rank in crossing.src.ranks else crossing.dst
        self._plans: dict[tuple[Shape, bool, bool], BoundaryPlan] = {}
        self._header_plan = crossing.plan_header(HEADER_LENGTH)
        self.memory = HostMemory()
        self._num_sent = 0
        self._num_received = 0
        self._open_finishes: deque[torch.Tensor] = deque()
        probe = crossing.probe
        self.sources = _ranks_text({t.src for t in probe.receives_of(self._rank)} or {t.src for t in probe.transfers})
        self.destinations = _ranks_text({t.dst for t in probe.sends_of(self._rank)})

    def plan(self, shape: Shape, *, src_sharded: bool = False, dst_sharded: bool = False) -> BoundaryPlan:
        """Return the plan for a global shape; planned once per shape. Arguments as for :meth:`Crossing.plan`."""
        key = (shape, src_sharded, dst_sharded)
        if key not in self._plans:
            self._plans[key] = self.crossing.plan(shape, src_sharded=src_sharded, dst_sharded=dst_sharded)
        return self._plans[key]

    def whole_shape(self, local: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the whole tensor for the own part `[S, B, ...]`."""
        return self._own_side.whole_shape(local, is_sharded=is_sharded)

    def local_shape(self, whole: Sequence[int], *, is_sharded: bool) -> Shape:
        """Give the shape of the own part; inverse of :meth:`whole_shape`."""
        return self._own_side.local_shape(whole, is_sharded=is_sharded)

    @property
    def _sending(self) -> str:
        return f"{self.crossing.name}, {self.crossing.unit} {self._num_sent}"

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
            cargo: what the tensor is; default is what the crossing is for.

        Raises:
            ConfigError: the tensor is not what the cargo allows, or not of the type that the receiver expects. (A
                mismatch in size would end the receiving process inside gloo.)
        """
        place = self._sending
        self._num_sent += 1
        if tensor.dtype != dtype:
            raise ConfigError(
                f"{place}: the tensor to send is {tensor.dtype}, the receiver expects {dtype}; set the configuration's "
                "pipeline_dtype to the type of the stage's output"
            )
        own = Holding(rank=self._rank, boxes=plan.src.boxes_of(self._rank))
        assert tuple(tensor.shape) == own.local_shape, (place, tensor.shape, own)
        local = self._start(plan, tensor.detach(), place)
        holding = plan.sent_from(self._rank)
        transfers = plan.sends_of(self._rank)
        pieces = [_packed([local[local_slices(box, holding)] for box in t.boxes]) for t in transfers]
        works = self._post(dist.isend, pieces, [t.dst for t in transfers], batched, cargo or self.crossing.cargo)
        return _VTPSendWork(self, works, pieces, place)

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
            cargo: what the tensor is; default is what the crossing is for.
        """
        place = f"{self.crossing.name}, {self.crossing.unit} {self._num_received}"
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
        works = self._post(dist.irecv, buffers, [t.src for t in transfers], batched, cargo or self.crossing.cargo)
        whole = tensor.detach()
        arriving = self._post_pieces(plan, whole)
        finish = functools.partial(self._finish, plan, landing, whole, arriving, place)
        return tensor.requires_grad_(requires_grad), _VTPRecvWork(self, works, copies, finish, place)

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
            place = f"{self.crossing.name}, {self.crossing.unit} {self._num_received}"
            raise ConfigError(
                f"{place}: {self.sources} would send {sent} {shape}, expected is {dtype} [S, B, {width or 'H'}]; "
                "give all stages one pipeline_dtype and hidden size"
            )
        return tuple(shape)

    def _empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        if self._platform.host_blocking_wait:
            return self.memory.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._platform.device())

    def _start(self, plan: BoundaryPlan, tensor: torch.Tensor, place: str) -> torch.Tensor:
        """Do the plan's start inside the sending stage and return the memory that the transfers read."""
        ranks = plan.start.group_of(self._rank)
        if ranks is None:
            return tensor
        assert plan.start.kind is CollectiveKind.GATHER, plan.start
        root, parts, whole = ranks[0], None, tensor
        if self._rank == root:
            holding = plan.sent_from(root)
            whole = self._empty(holding.local_shape, tensor.dtype)
            parts = [whole[local_slices(plan.src.boxes_of(rank)[0], holding)] for rank in ranks]
        part = tensor.contiguous()
        self._collective("gather", ranks, place, lambda: dist.gather(part, parts, root, self._stage_group))
        return whole

    def _post_pieces(self, plan: BoundaryPlan, tensor: torch.Tensor) -> list[dist.Work]:
        """Post the receives of an all-gather by messages: before anything is waited for, so no sender ever waits."""
        ranks = plan.finish.group_of(self._rank)
        if ranks is None or plan.finish.kind is not CollectiveKind.ALL_GATHER or self._pieces_group is None:
            return []
        self._open_finishes.append(tensor)
        pieces = _pieces(tensor, ranks)
        sources = [rank for rank in _others(ranks, self._rank, -1) if len(pieces[rank])]
        works = [dist.irecv(pieces[rank], rank, self._pieces_group) for rank in sources]
        return [work for work in works if work is not None]

    def _send_pieces(self, tensor: torch.Tensor, ranks: tuple[int, ...], arriving: list[dist.Work]) -> None:
        """Complete a tensor of which each rank has one even cut of the rows, by messages to all others."""
        # Messages carry no tags: the finishes of a channel must be done in the order in which they were posted.
        assert self._open_finishes.popleft() is tensor, f"{self.crossing.name}: receives are waited for out of order"
        piece = _pieces(tensor, ranks)[self._rank]
        sends = [dist.isend(piece, rank, self._pieces_group) for rank in _others(ranks, self._rank, 1) if len(piece)]
        for work in (*sends, *arriving):
            assert work is not None
            work.wait()

    def _finish(
        self, plan: BoundaryPlan, landed: torch.Tensor, tensor: torch.Tensor, arriving: list[dist.Work], place: str
    ) -> None:
        """Do the plan's finish inside the receiving stage.

        Args:
            plan: of the exchange.
            landed: memory that the transfers filled.
            tensor: memory to complete, the same except for the root of a scatter.
            arriving: receives from :meth:`_post_pieces`.
            place: for error messages.
        """
        ranks = plan.finish.group_of(self._rank)
        if ranks is None:
            return
        kind, root, group = plan.finish.kind, ranks[0], self._stage_group
        if kind is CollectiveKind.BROADCAST:
            self._collective(kind, ranks, place, lambda: dist.broadcast(tensor, root, group))
        elif kind is CollectiveKind.SCATTER:
            parts = None
            if self._rank == root:
                holding = plan.lands_in(root)
                parts = [landed[local_slices(plan.dst.boxes_of(rank)[0], holding)] for rank in ranks]
            self._collective(kind, ranks, place, lambda: dist.scatter(tensor, parts, root, group))
        else:
            assert kind is CollectiveKind.ALL_GATHER, plan.finish
            if self._pieces_group is not None:
                self._collective(kind, ranks, place, lambda: self._send_pieces(tensor, ranks, arriving))
            else:
                index = ranks.index(self._rank)
                self._collective(kind, ranks, place, lambda: _all_gather_rows(tensor, index, len(ranks), group))

    def _collective(self, kind: str, ranks: Sequence[int], place: str, run: Callable[[], object]) -> None:
        """Run a collective of the own stage, timed by the monitor."""
        assert self._stage_group is not None, "a stage of several ranks has a group"
        peer = f"the members {_ranks_text(set(ranks))} of this stage"
        wait = self._monitor.begin(place, peer) if self._monitor is not None else None
        try:
            run()
        except RuntimeError as error:
            raise PeerError(f"{place}: {kind} among {peer} broke ({str(error).splitlines()[0]})") from error
        self._end(wait)

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
                self._audit.note(way, cargo, tensor, peer, self.crossing.name)
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
        transfers: tuple[Transfer, ...] = self.crossing.probe.transfers
        element = torch.zeros(1, dtype=torch.float32, device=self._platform.device())
        for transfer in transfers:
            if self._rank == transfer.src:
                works = self._post(dist.isend, [element], [transfer.dst], False, Cargo.WARM_UP)
                self.wait_for(works, f"{self.crossing.name}, warm-up", f"rank {transfer.dst}")
            elif self._rank == transfer.dst:
                works = self._post(dist.irecv, [element], [transfer.src], False, Cargo.WARM_UP)
                self.wait_for(works, f"{self.crossing.name}, warm-up", f"rank {transfer.src}")


def _packed(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the pieces as one dense tensor; a single one that is dense already is not copied."""
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(list(pieces))


def _pieces(tensor: torch.Tensor, ranks: Sequence[int]) -> dict[int, torch.Tensor]:
    """Cut a tensor evenly along the rows: each rank's piece, as a view."""
    cuts = even_cuts(len(tensor), len(ranks))
    return {rank: tensor[start:stop] for rank, (start, stop) in zip(ranks, cuts, strict=True)}


def _others(ranks: Sequence[int], own: int, step: int) -> list[int]:
    """List the other ranks round the ring from the own one, so that not all talk to the same one at once."""
    index = ranks.index(own)
    return [ranks[(index + step * distance) % len(ranks)] for distance in range(1, len(ranks))]


def _all_gather_rows(tensor: torch.Tensor, index: int, num_ranks: int, group: dist.ProcessGroup | None) -> None:
    """Complete a tensor of which each rank has one even cut of the rows, in its place.

    Pieces of equal size are gathered in place. Otherwise they are padded to the largest one: backends gather equal
    pieces only.
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


def _ranks_text(ranks: set[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(str(r) for r in sorted(ranks))
