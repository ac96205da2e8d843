"""A channel: one direction between two sides. Tensors go in on one side and come out on the other, in one order.

A caller gives or takes this rank's part of a tensor. The channel decides how the tensor is cut, whose links it uses,
whether a header with its shape goes first, and in which order all of it is posted and waited for.

Each channel has a process group that carries point-to-point messages only (docs/architecture.md, contract 3). The
collectives of a plan run in the stage's tensor-parallel group: the start when a send is posted, the finish when a
receive is waited for. Every member of the stage sends, posts and waits at the same program point.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from vtp_plugin.boundary.cargo import Cargo
from vtp_plugin.boundary.channel_spec import ChannelSpec
from vtp_plugin.boundary.check import require_valid
from vtp_plugin.boundary.side import Shape, Side
from vtp_plugin.errors import ConfigError, PlanError
from vtp_plugin.platform.base import Platform
from vtp_plugin.runtime.audit import HEADER_LENGTH, Audit
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.process_groups import close_groups
from vtp_plugin.runtime.transfers import ChannelGroups, Parcel, Transfers
from vtp_plugin.runtime.work import Landing, SendWork, TimedWaits, ranks_text

# Where lengths vary, a run meets more shapes than it should keep plans of.
NUM_PLANS = 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFormat:
    """What both sides of a channel know about its tensors.

    Attributes:
        dtype: of every tensor.
        src_sharded: the sending ranks hold slices of dimension 0 (sequence parallelism, or a cut weight), not copies.
        dst_sharded: the receiving ranks want slices.
        has_variable_shapes: a header with the shape crosses before every tensor.
        width: last dimension of every tensor, to check headers against; None if it is not known.
        is_batched: coalesce messages into one call of the backend.
        requires_grad: the received tensor is a leaf that autograd needs.
    """

    dtype: torch.dtype
    src_sharded: bool = False
    dst_sharded: bool = False
    has_variable_shapes: bool = False
    width: int | None = None
    is_batched: bool = False
    requires_grad: bool = True


class Channel:
    """One direction between two sides. Used from the main thread only.

    Args:
        spec: what crosses between whom.
        order: number among all channels of the run; exchanges post in this order.
        groups: carry its messages and collectives.
        platform: says how to wait.
        monitor: keeps the time; None in single-process use.
        audit: records every message; None without ``--vtp-audit``.
    """

    def __init__(
        self,
        spec: ChannelSpec,
        order: int,
        groups: ChannelGroups,
        platform: Platform,
        monitor: Monitor | None,
        audit: Audit | None = None,
    ) -> None:
        self.spec = spec
        self.order = order
        self._groups = groups
        self._platform = platform
        self._monitor = monitor
        self._audit = audit
        self._transfers = Transfers(spec.name, groups, platform, TimedWaits(platform, monitor), audit)
        self._is_src = dist.get_rank() in spec.src.ranks
        self._header_plan = spec.plan_header(self.header_length)
        self._plan = functools.lru_cache(NUM_PLANS)(spec.plan)
        self._num_sent = self._num_received = 0
        self._receives: deque[RecvWork] = deque()
        self._header: Landing | None = None
        probe, rank = spec.probe, dist.get_rank()
        self._sources = ranks_text({t.src for t in probe.receives_of(rank)} or {t.src for t in probe.transfers})
        self._destinations = ranks_text({t.dst for t in probe.sends_of(rank)})

    def start_step(self) -> None:
        """Count microbatches from 0 again."""
        self._num_sent = self._num_received = 0

    def send(self, tensor: torch.Tensor, form: TensorFormat) -> SendWork:
        """Send this rank's part of a tensor; with variable shapes a header goes before it.

        Args:
            tensor: `[S, B, H]`, the part that this rank holds. It keeps its memory until the work is waited for.
            form: of the tensor, the same on both sides.

        Raises:
            ConfigError: the tensor is not what the cargo allows, or not what the receiver expects.
        """
        return self._send(tensor, self.whole_shape(tensor.shape, form), form)

    def _send(self, tensor: torch.Tensor, whole: Shape, form: TensorFormat) -> SendWork:
        position = f"{self.spec.name}, {self.spec.unit} {self._num_sent}"
        header = self._send_header(whole, form.dtype, position) if form.has_variable_shapes else None
        self._num_sent += 1
        work = self._transfers.send(tensor, self._parcel(whole, form, position, self._destinations))
        return work if header is None else header.joined_with(work)

    def post(self, form: TensorFormat, shape: Sequence[int] = ()) -> RecvWork:
        """Post the receive of the next tensor that the other side sends.

        With variable shapes, the header is posted first. When it has come, the tensor is posted, and right behind it
        the next header, so that both sides use the channel in one order.

        Args:
            form: of the tensor, the same on both sides.
            shape: of the part that this rank wants; not used with variable shapes.
        """
        return self._post(form, None if form.has_variable_shapes else self.whole_shape(shape, form))

    def _post(self, form: TensorFormat, whole: Shape | None) -> RecvWork:
        receive = RecvWork(self, form, f"{self.spec.name}, {self.spec.unit} {self._num_received}")
        self._num_received += 1
        self._receives.append(receive)
        if whole is not None:
            self._post_tensor(receive, whole)
        elif self._header is None:
            self._header = self._post_header(receive)
        return receive

    def take(self) -> torch.Tensor:
        """Wait for the oldest receive and return its tensor."""
        return self._receives[0].take()

    @property
    def header_length(self) -> int:
        """Integers of a header."""
        return HEADER_LENGTH

    @property
    def sends_from_here(self) -> bool:
        """Whether messages leave from this rank itself; another rank of its stage may send them."""
        return bool(self.spec.probe.sends_of(dist.get_rank()))

    @property
    def num_allocations(self) -> int:
        """How often receives needed fresh memory on the host so far; constant in a steady state with fixed shapes."""
        return self._transfers.memory.num_allocations

    def whole_shape(self, local: Sequence[int], form: TensorFormat) -> Shape:
        """Give the shape of the whole tensor for this rank's part `[S, B, ...]`."""
        side, is_sharded = self._own_side(form)
        return side.whole_shape(local, is_sharded=is_sharded)

    def local_shape(self, whole: Sequence[int], form: TensorFormat) -> Shape:
        """Give the shape of this rank's part; inverse of :meth:`whole_shape`."""
        side, is_sharded = self._own_side(form)
        return side.local_shape(whole, is_sharded=is_sharded)

    def crossed_by(self, strategy: str, *, unit: str | None = None, cargo: Cargo | None = None) -> Channel:
        """Return a channel over the same groups that uses another strategy.

        Args:
            strategy: needs no rank that this channel's groups lack; ``rank0`` needs fewer ranks than ``sliced``, and
                that fewer groups than ``divided``.
            unit: what a message counts as; default is as before.
            cargo: what it carries; default is as before.

        Raises:
            PlanError: the group lacks a rank.
        """
        spec = dataclasses.replace(
            self.spec, strategy=strategy, unit=unit or self.spec.unit, cargo=cargo or self.spec.cargo
        )
        if not set(spec.participants) <= set(self.spec.participants):
            raise PlanError(f"{spec.name}: {strategy} needs the ranks {spec.participants}, which have no group")
        require_valid(spec.probe)
        require_valid(spec.plan_header(HEADER_LENGTH))
        return Channel(spec, self.order, self._groups, self._platform, self._monitor, self._audit)

    def warm_up(self) -> None:
        """Let the backend connect, see :meth:`~vtp_plugin.runtime.transfers.Transfers.warm_up`."""
        self._transfers.warm_up(self.spec.probe)

    def close(self) -> None:
        """Destroy the groups that only this channel uses; every rank of both sides does it, once all is received."""
        if not self._platform.host_blocking_wait:
            # The host may be ahead of what it has issued.
            self._platform.module().synchronize()
        close_groups((self._groups.messages, self._groups.pieces))

    def post_up_to(self, receive: RecvWork) -> None:
        """Read headers until a receive is posted, in order."""
        while not receive.is_posted:
            self._read_header()

    def complete(self, receive: RecvWork) -> None:
        """Wait for a receive, after all earlier ones: finishes inside the stage keep the order of posting."""
        while not receive.is_done:
            self.post_up_to(self._receives[0])
            self._receives.popleft().finish()

    def _own_side(self, form: TensorFormat) -> tuple[Side, bool]:
        return (self.spec.src, form.src_sharded) if self._is_src else (self.spec.dst, form.dst_sharded)

    def _parcel(self, whole: Shape, form: TensorFormat, position: str, peer: str) -> Parcel:
        return Parcel(
            plan=self._plan(whole, src_sharded=form.src_sharded, dst_sharded=form.dst_sharded),
            dtype=form.dtype,
            cargo=self.spec.cargo,
            position=position,
            peer=peer,
            is_batched=form.is_batched,
            in_portions=self._platform.gathers_by_messages,
        )

    def _post_tensor(self, receive: RecvWork, whole: Shape) -> None:
        parcel = self._parcel(whole, receive.form, receive.position, self._sources)
        receive.start(self._transfers.receive(parcel))

    def _header_parcel(self, position: str, peer: str) -> Parcel:
        return Parcel(plan=self._header_plan, dtype=torch.int64, cargo=Cargo.SHAPE_HEADER, position=position, peer=peer)

    def _header_of(self, whole: Shape, position: str) -> tuple[int, ...]:
        """Give what a header says besides the type."""
        if len(whole) != HEADER_LENGTH - 1:
            raise ConfigError(
                f"{position}: the tensor to send has the shape {whole}, not [S, B, H]; return an activation of three "
                "dimensions from the stage"
            )
        return whole

    def _send_header(self, whole: Shape, dtype: torch.dtype, position: str) -> SendWork:
        """Send shape and type of the tensor that follows: an int64 tensor, never a pickled object."""
        values = (*self._header_of(whole, position), DTYPES.index(dtype))
        header = torch.tensor(values, dtype=torch.int64, device=self._platform.device())
        shape = self._header_plan.src.holdings[0].local_shape
        return self._transfers.send(header.reshape(shape), self._header_parcel(position, self._destinations))

    def _post_header(self, receive: RecvWork) -> Landing:
        return self._transfers.receive(self._header_parcel(receive.position, self._sources))

    def _read_header(self) -> None:
        """Wait for the posted header, then post its tensor and the next header."""
        if self._header is None:
            raise PlanError(f"{self.spec.name}: no header is under way")
        receive, *later = (receive for receive in self._receives if not receive.is_posted)
        self._post_tensor(receive, self._shape_in(self._header.wait(), receive))
        self._header = self._post_header(later[0]) if later else None

    def _shape_in(self, header: torch.Tensor, receive: RecvWork) -> Shape:
        """Return the shape of the whole tensor that a header announces, if it is what this rank expects."""
        (*shape, code), *others = header.reshape(-1, HEADER_LENGTH).tolist()
        if any(other != [*shape, code] for other in others):
            raise ConfigError(
                f"{receive.position}: of {self._sources} one replica would send its part of {shape}, another of "
                f"{[other[:-1] for other in others]}, but one microbatch joins their samples; give all replicas as "
                "many samples of one length"
            )
        form = receive.form
        sent = DTYPES[code] if 0 <= code < len(DTYPES) else f"type {code}"
        if sent != form.dtype or min(shape) < 1 or (form.width is not None and shape[-1] != form.width):
            # To receive it would end the process inside the backend.
            raise ConfigError(
                f"{receive.position}: {self._sources} would send {sent} {shape}, expected is {form.dtype} [S, B, "
                f"{form.width or 'H'}]; give all stages one pipeline_dtype and hidden size"
            )
        return tuple(shape)


class RecvWork:
    """A receive under way.

    Every tensor-parallel rank of the receiving stage has one, even a rank that receives nothing itself, and waits for
    it at the same program point.

    Attributes:
        form: of the tensor.
        position: boundary, direction and number, for error messages.
        is_done: it was waited for.
    """

    def __init__(self, channel: Channel, form: TensorFormat, position: str) -> None:
        self.form = form
        self.position = position
        self._channel = channel
        self._landing: Landing | None = None
        self._tensor: torch.Tensor | None = None
        self.is_done = False

    @property
    def is_posted(self) -> bool:
        """Whether the shape of the tensor is known, and its memory waits for it."""
        return self.is_done or self._landing is not None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, to be read before :meth:`wait` fills it; with variable shapes this waits for its header."""
        self._channel.post_up_to(self)
        if self._tensor is None:
            raise PlanError(f"{self.position}: the tensor was handed out already; read it before wait(), or use take()")
        return self._tensor

    def start(self, landing: Landing) -> None:
        """Note the memory that the tensor lands in; for the channel."""
        self._landing = landing
        self._tensor = landing.tensor.requires_grad_(self.form.requires_grad)

    def finish(self) -> None:
        """Wait for the tensor itself; for the channel."""
        landing, self._landing, self.is_done = self._landing, None, True
        if landing is None:
            raise PlanError(f"{self.position}: nothing is posted")
        landing.wait()

    def wait(self) -> None:
        """Return when the tensor holds the local part of what was sent; idempotent.

        What was sent before it on the same channel is waited for first.

        Raises:
            PeerError: the connection to the sender, or to a member of this rank's stage, broke.
            ConfigError: a header does not fit what this rank expects.
        """
        self._channel.complete(self)
        # Megatron keeps handles longer than tensors: the memory must be free as soon as nobody else needs it.
        self._tensor = None

    def take(self) -> torch.Tensor:
        """Wait, and return the tensor: a fresh leaf. May be called once, and not after :meth:`wait`."""
        tensor = self.tensor
        self.wait()
        return tensor
