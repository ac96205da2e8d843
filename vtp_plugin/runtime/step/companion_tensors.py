"""What comes with a microbatch: lengths, positions, pictures, packed rows.

Companions: tensors of a batch that later stages need beside the activation.

Attention has to know where the samples of a packed row end, or where the tokens of a picture stand. In a U-shaped
pipeline only the edge has data, so these cross before the activation of their microbatch, over the same channels, into
every stage of the cloud. There the script's forward step finds them in its iterator.

A :class:`Companion` declares what crosses: kind, type, shape, the stage that reads it, and the stages that want it.
Every planned pipeline of one module carries it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from vtp_plugin.errors import ConfigError, PeerError
from vtp_plugin.plan.boundary.message_kind import MessageKind
from vtp_plugin.plan.layout.pipeline_layout import ChannelId, Direction
from vtp_plugin.plan.schedule.order.actions import Action, Op, carriers, channel_of
from vtp_plugin.plan.schedule.order.placement import Placement, num_rings
from vtp_plugin.platform.interface import Platform
from vtp_plugin.runtime.comm.channel import BoundChannel, Channel, RecvWork
from vtp_plugin.runtime.comm.tensor_format import TensorFormat
from vtp_plugin.runtime.comm.work import SendWork
from vtp_plugin.runtime.step.stage_channels import vstages_over


class Reader:
    """Iterator that reads by a function."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        return self._read()


def checked(given: Any, check: Callable[[Any], None]) -> Any:
    """Let every batch be checked when it is read.

    Args:
        given: Megatron's data iterator, None, or a list of these, one for each chunk.
        check: raises an error if a batch must not be read.

    >>> [next(batches) for batches in checked([iter("a"), iter("b")], print)]
    a
    b
    ['a', 'b']
    >>> checked(None, print)
    """
    if isinstance(given, list):
        return [checked(each, check) for each in given]
    return None if given is None else Reader(lambda: _read(given, check))


def _read(batches: Iterator[Any], check: Callable[[Any], None]) -> Any:
    batch = next(batches)
    check(batch)
    return batch


_WAY_OUT = "give rows as Megatron's data sets do, with --micro-batch-size 1"


def packed_rows(row_length: int) -> Companion:
    """Return the companion by which the lengths of packed samples cross.

    Args:
        row_length: number of tokens of a row.
    """
    return Companion(
        kind=MessageKind.LENGTHS,
        shape=(row_length + 1, 1, 1),
        read=lambda row: padded_ends(row, row_length + 1),
        give=_row,
        unit="row",
        says="where its samples end",
        way_out=_WAY_OUT,
    )


def _row(ends: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a row's lengths in the form of Megatron's data sets.

    Kernels read memory at these positions, so they are checked. That waits for the device, as Megatron does a moment
    later for the longest sample.

    Raises:
        CompanionError: they do not count up inside the row.

    >>> _row(torch.tensor([0, 2, 3, 3]))
    {'cu_seqlens': tensor([[0, 2, 3, 3]]), 'max_seqlen': tensor([2])}
    """
    row = ends.flatten()
    lengths = row.diff()
    # A difference of two int32 may overflow, so the ends are looked at first.
    if bool((row[:1] != 0).any() | (row < 0).any() | (row >= row.numel()).any() | (lengths < 0).any()):
        raise CompanionError(
            "lengths of packed samples that do not count up inside their row",
            f"they start at 0 and end at {row.numel() - 1}, the tokens of a row, at most",
        )
    return {"cu_seqlens": row.view(1, -1), "max_seqlen": lengths.amax(dim=0, keepdim=True)}


def padded_ends(row: Any, length: int) -> torch.Tensor:
    """Return the ends of a row's samples, as int32 of a fixed length, padded with the last end.

    Args:
        row: a microbatch as data loaders give it; ``cu_seqlens`` is ``[1, n]``, counts up from 0, may be padded.
        length: length of the result: one more than a row has tokens.

    Raises:
        ConfigError: the row has no ``cu_seqlens`` in this form.

    >>> padded_ends({"cu_seqlens": torch.tensor([[0, 2, 5, 5]])}, 6).tolist()
    [0, 2, 5, 5, 5, 5]
    """
    given = row if isinstance(row, Mapping) else {}
    ends, padded = given.get("cu_seqlens"), given.get("cu_seqlens_padded")
    if not isinstance(ends, torch.Tensor) or padded is not None:
        what = "a row without cu_seqlens" if padded is None else "a row with cu_seqlens_padded"
        raise ConfigError(f"{what}; the cloud needs the lengths of the samples, as cu_seqlens only; {_WAY_OUT}")
    values = ends.detach().flatten().tolist()
    is_ascending = all(a <= b for a, b in pairwise(values))
    # Where a row is padded, the last end stands there several times.
    values = values[: values.index(values[-1]) + 1] if values else values
    if not 1 < len(values) <= length or values[0] != 0 or values[-1] >= length or not is_ascending:
        raise ConfigError(
            f"cu_seqlens of the shape {tuple(ends.shape)}; they must count up from 0 to at most {length - 1}, the "
            f"tokens of one row; {_WAY_OUT}"
        )
    return torch.tensor(values + values[-1:] * (length - len(values)), dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Companion:
    """A kind of companion: which tensor of a batch crosses, in which form, from which stage to which.

    Attributes:
        kind: kind of message; its row of :data:`~vtp_plugin.plan.boundary.message_kind.MESSAGE_FORMS` says which
            tensors pass.
        shape: shape of every companion. If its first lengths are None they vary, and a header goes before each.
        read: makes the companion from what the script's iterator gives.
        give: makes what the script's forward step reads at the stages that want the companion; entries of a batch. It
            raises a :class:`CompanionError` of values that size memory or point into it, and cannot be.
        unit: name of what the script reads for a microbatch, such as ``"row"``, for errors.
        says: what later stages would not know without the companion, for errors.
        way_out: advice for the error about a forward that reads several batches.
        dtype: type of every companion.
        most_tokens: largest `S * B` of a shape that varies; None sets no limit.
        src: stage that reads it from its batch.
        dst: stages that want it; None for all others.
        chunks: chunks of stage `src` that read it; None for all. In a U of two rings each begins one.
    """

    kind: MessageKind
    shape: tuple[int | None, int | None, int]
    read: Callable[[Any], torch.Tensor]
    give: Callable[[torch.Tensor], Mapping[str, Any]]
    unit: str
    says: str
    way_out: str
    dtype: torch.dtype = torch.int32
    most_tokens: int | None = None
    src: int = 0
    dst: frozenset[int] | None = None
    chunks: frozenset[int] | None = None

    def form(self, *, is_batched: bool) -> TensorFormat:
        """Say how it crosses.

        Args:
            is_batched: whether messages are coalesced into one call of the backend.
        """
        return TensorFormat(
            dtype=self.dtype,
            has_variable_shapes=None in self.shape,
            width=self.shape[-1],
            most_tokens=self.most_tokens,
            is_batched=is_batched,
            requires_grad=False,
        )

    @property
    def least_shape(self) -> list[int]:
        """Its shape, with 1 for lengths that vary."""
        return [length or 1 for length in self.shape]

    def shaped(self, made: torch.Tensor) -> torch.Tensor:
        """Give what was read its shape, unless it has one of its own."""
        return made if None in self.shape else made.view(self.least_shape)


class CompanionError(PeerError):
    """A companion has values that cannot be, so nothing is made of it.

    Args:
        what: the companion, and what is wrong with its values.
        rule: what they must be.
    """

    def __init__(self, what: str, rule: str) -> None:
        text = (
            f"{what}, from another stage; {rule}; install one version on all ranks, or ask the owner of that stage "
            "what it has sent (docs/guides/edge-cloud.md)"
        )
        super().__init__(text, shared=text)


class Companions:
    """Moves the companions of this rank's microbatches; for the main thread only. See :func:`join_companions`.

    Args:
        crossings: what crosses here, in the order in which it crosses before an activation.
        has_data: whether this stage reads batches of its own.
    """

    def __init__(self, crossings: Sequence[_Crossing] = (), *, has_data: bool = True) -> None:
        self._crossings = tuple(crossings)
        self._has_data = has_data
        self._now = -1, -1

    def start_step(self, *, is_batched: bool) -> None:
        """Count microbatches from 0 again.

        Args:
            is_batched: whether messages are coalesced into one call of the backend, as those of the activations are.
        """
        # Or the first forward would forget what has come for it, where it was the last one of the step before, too.
        self._now = -1, -1
        for crossing in self._crossings:
            crossing.start_step(is_batched=is_batched)

    def iterators(self, iterators: Sequence[Any]) -> list[Any]:
        """Return the iterators that the script's forward step reads, one for each chunk.

        Args:
            iterators: Megatron's iterators; a rank that reads nothing has None.
        """
        if not self._crossings:
            return list(iterators)
        is_given = any(crossing.is_wanted for crossing in self._crossings)
        return [
            Reader(functools.partial(self._read, batches)) if is_given or batches is not None else None
            for batches in iterators
        ]

    def post(self, receive: Action) -> None:
        """Post the receives of the companions of an activation, before that of the activation itself."""
        for crossing in self._crossings:
            crossing.post(receive)

    def take(self, receive: Action) -> None:
        """Wait for the companions of an activation."""
        for crossing in self._crossings:
            crossing.take(receive)

    def enter(self, forward: Action) -> None:
        """Note the forward that reads its batch from now on."""
        for crossing in self._crossings:
            crossing.leave(self._now)
        self._now = forward.vstage, forward.microbatch

    def send_before(self, send: Action) -> list[SendWork]:
        """Send the companions of an activation, before the activation itself."""
        return [work for crossing in self._crossings for work in crossing.send_before(send)]

    def _read(self, batches: Iterator[Any] | None) -> Any:
        """Read the batch of the forward that runs: this stage's own, with the companions that have come."""
        batch = next(batches) if self._has_data and batches is not None else {}
        for crossing in self._crossings:
            if crossing.is_src:
                crossing.read(self._now, batch)
            batch = crossing.given(self._now, batch)
        return batch


def join_companions(
    placement: Placement,
    worker: int,
    channels: Mapping[ChannelId, Channel],
    companions: Sequence[Companion],
    platform: Platform,
) -> Companions:
    """Bind what crosses to this rank's channels.

    Args:
        placement: which stage holds which virtual stage.
        worker: number of this rank's replica in the schedule.
        channels: channels of this rank by their identity.
        companions: what crosses; before an activation they cross in this order.
        platform: where this rank computes.
    """
    stage = placement.stage_of(worker)
    crossings = [_Crossing(placement, stage, channels, companion, platform) for companion in companions]
    # In a U the edge alone has data. Elsewhere each stage that reads a batch keeps reading it.
    return Companions(crossings, has_data=stage == 0 or not num_rings(placement))


class _Crossing:
    """One kind of companion on this rank; the arguments are those of :func:`join_companions`."""

    def __init__(
        self,
        placement: Placement,
        stage: int,
        channels: Mapping[ChannelId, Channel],
        companion: Companion,
        platform: Platform,
    ) -> None:
        self._placement = placement
        self._companion = companion
        self._platform = platform
        self._carriers = carriers(placement, companion.src, companion.dst, companion.chunks)
        self.is_src = stage == companion.src
        self.is_wanted = not self.is_src and (companion.dst is None or stage in companion.dst)
        self._channels = {
            name: channel.crossed_by(
                "rank0", unit=f"{companion.kind} of microbatch", kind=companion.kind, is_beside=True
            )
            for name, channel in channels.items()
            if name.direction is Direction.FORWARD and self._carriers.intersection(vstages_over(placement, name))
        }
        self._bound: dict[ChannelId, BoundChannel] = {}
        self._posted: dict[Action, RecvWork] = {}
        self._held: dict[tuple[int, int], torch.Tensor] = {}

    def start_step(self, *, is_batched: bool) -> None:
        form = self._companion.form(is_batched=is_batched)
        shape = self._companion.least_shape
        self._bound = {name: BoundChannel(channel, form, shape) for name, channel in self._channels.items()}
        for bound in self._bound.values():
            bound.start_step()
        self._held.clear()

    def post(self, receive: Action) -> None:
        if receive.op is Op.RECV_F and receive.vstage - 1 in self._carriers:
            self._posted[receive] = self._bound[channel_of(self._placement, receive)].post()

    def take(self, receive: Action) -> None:
        posted = self._posted.pop(receive, None)
        if posted is not None:
            self._held[receive.vstage, receive.microbatch] = posted.take()

    def read(self, now: tuple[int, int], batch: Any) -> None:
        """Make the companion of the forward that reads a batch.

        Raises:
            ConfigError: it has read one already.
        """
        if now[0] not in self._carriers:
            return
        if now in self._held:
            unit, way_out = self._companion.unit, self._companion.way_out
            raise ConfigError(f"a forward step that reads two {unit}s; a microbatch is one {unit}; {way_out}")
        made = self._companion.shaped(self._companion.read(batch))
        self._held[now] = made.to(self._platform.device(), non_blocking=True)

    def given(self, now: tuple[int, int], batch: Any) -> Any:
        """Add what has come to a batch."""
        if not self.is_wanted or now not in self._held:
            return batch
        return {**batch, **self._companion.give(self._held[now])}

    def leave(self, forward: tuple[int, int]) -> None:
        """Forget the companion of a forward that has run, if it goes no further."""
        if forward[0] not in self._carriers:
            self._held.pop(forward, None)

    def send_before(self, send: Action) -> Iterator[SendWork]:
        """Send the companion of an activation, if it has one.

        Raises:
            ConfigError: the forward has read nothing.
        """
        if send.op is not Op.SEND_F or send.vstage not in self._carriers:
            return
        bound = self._bound[channel_of(self._placement, send)]
        held = self._held.pop((send.vstage, send.microbatch), None)
        if held is None:
            if bound.channel.sends_from_here:
                unit, says = self._companion.unit, self._companion.says
                raise ConfigError(
                    f"{send}: the script's forward step has read no {unit}, so later stages would not know {says}; "
                    f"read one {unit} in every forward of stage {self._companion.src}"
                )
            held = torch.zeros(self._companion.least_shape, dtype=self._companion.dtype, device=self._platform.device())
        yield bound.send(held)
