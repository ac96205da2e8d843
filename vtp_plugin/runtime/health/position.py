"""Where each rank stands, and for whom it waits.

Where each rank is, and who waits for whom: what a hanging run reports.

A rank that has waited too long names its peer, which may be healthy and wait itself. So every rank says where it
stands, and the line follows the waits from rank to rank: to one that does not answer, to one that waits for nobody, or
round a circle.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Protocol

import torch.distributed as dist

from vtp_plugin.runtime.health.startup_waiting import some_ranks
from vtp_plugin.runtime.health.store import Topic, parse_post

COLLECTIVES = "torch/distributed/distributed_c10d.py"
"""The file of torch's collectives."""
_MOST_LINKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a rank is doing.

    Attributes:
        text: clause that follows the rank's number: "waits at boundary 0->1, forward, microbatch 1, for rank 0".
        peers: ranks for which it waits; empty if it waits for nobody.
        group: all ranks of the collective that it is in; empty outside collectives.
    """

    text: str
    peers: tuple[int, ...] = ()
    group: tuple[int, ...] = ()

    def dump(self) -> str:
        """Write it for the store; inverse of :func:`load_standing`."""
        return json.dumps(asdict(self))


def load_standing(text: str | bytes) -> Standing:
    """Read what another rank has posted; inverse of :meth:`Standing.dump`.

    Raises:
        PeerError: the post is something else.

    >>> load_standing(Standing(text="computes 1F0", peers=(2,)).dump())
    Standing(text='computes 1F0', peers=(2,), group=())
    """
    return parse_post(Standing, text, Topic.WATCH.key, "here")


def ranks_in(peer: str) -> tuple[int, ...]:
    """Return the ranks that a wait names.

    >>> ranks_in("ranks 0, 12"), ranks_in("the other ranks of the stage")
    ((0, 12), ())
    """
    return tuple(map(int, re.findall(r"\d+", peer))) if re.match(r"ranks? \d", peer) else ()


@dataclass(frozen=True, slots=True)
class BlockedCollective:
    """A collective of torch.distributed in which this process waits.

    Attributes:
        name: name of torch's function.
        ranks: ranks of its group; empty if the call does not say.
        frame: stack frame of the call; while it is referenced, no later call has the same one.
    """

    name: str
    ranks: tuple[int, ...]
    frame: FrameType


def find_collective() -> BlockedCollective | None:
    """Look through the stacks of all threads for a collective that blocks the host; None if there is none.

    On a device the CPU continues while the device waits, and then nothing is found.
    """
    for frame in sys._current_frames().values():
        for one in outwards(frame):
            # Private functions of that file are called by the one that a program has called.
            if one.f_code.co_filename.endswith(COLLECTIVES) and not one.f_code.co_name.startswith("_"):
                return BlockedCollective(one.f_code.co_name, _ranks_of(one.f_locals.get("group")), one)
    return None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, the one that called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ranks_of(group: object) -> tuple[int, ...]:
    with contextlib.suppress(Exception):  # a group that ends meanwhile; this only describes
        if group is None or isinstance(group, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(group))
    return ()


def follow(rank: int, own: Standing, ask: Callable[[int], Standing | None]) -> str:
    r"""Follow the waits from rank to rank; return what each of the other ranks does, after a semicolon.

    Args:
        rank: rank to start at.
        own: what that rank is doing.
        ask: returns what another rank is doing; None if it does not answer.

    >>> others = {0: Standing(text="waits at boundary 0->1, backward, microbatch 0, for rank 1", peers=(1,)),
    ...           1: Standing(text="stands in all_to_all_single of ranks 1, 2, inside 1F0", peers=(2,), group=(1, 2))}
    >>> own = Standing(text="waits at boundary 0->1, forward, microbatch 1, for rank 0", peers=(0,))
    >>> print(follow(2, own, others.get).replace("; ", "\n")[1:])
    rank 0 waits at boundary 0->1, backward, microbatch 0, for rank 1
    rank 1 stands in all_to_all_single of ranks 1, 2, inside 1F0
    ranks 2, 0, 1 wait for each other in a circle
    """
    path, here, text = [rank], own, ""
    for _ in range(_MOST_LINKS):
        standings = {peer: own if peer == rank else ask(peer) for peer in here.peers}
        missing = [peer for peer, one in standings.items() if not here.group or one is None or one.group != here.group]
        if not missing:
            return text + (f"; all ranks of that group stand in it: {_calls(standings)}" if here.peers else "")
        peer = missing[0]
        if peer in path:
            circle = path[path.index(peer) :]
            return f"{text}; ranks {', '.join(map(str, circle))} wait for each other in a circle"
        found = standings[peer]
        if found is None:
            return f"{text}; rank {peer} does not answer"
        text += f"; rank {peer} {found.text}"
        path.append(peer)
        here = found
    return text


def _calls(standings: dict[int, Standing | None]) -> str:
    texts: Sequence[str] = sorted({one.text for one in standings.values() if one is not None})
    return " | ".join(texts)


# Collectives that no rank leaves before all have come. A rank may be done long before with a gather or a broadcast.
_OF_ALL = frozenset({
    "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all", "all_to_all_single", "barrier",
    "reduce_scatter", "reduce_scatter_tensor",
})  # fmt: skip


class BlockedCall:
    """The collective in which this process waits, and since when."""

    def __init__(self) -> None:
        self._call: BlockedCollective | None = None
        self._since_s = 0.0

    def name(self, rank: int, now_s: float, patience_s: float) -> str | None:
        """Name the collective in which this process has waited too long for a rank that takes part in it; None if none.

        Args:
            rank: rank that has ended.
            now_s: time now, in seconds.
            patience_s: how long a collective may take once the last rank has come.
        """
        call = find_collective()
        if call is None or self._call is None or call.frame is not self._call.frame:
            self._call, self._since_s = call, now_s
        if call is None or call.name not in _OF_ALL or now_s - self._since_s < patience_s:
            return None
        return call.name if rank in call.ranks else None


class DeviceEvent(Protocol):
    """Interface of ``torch.cuda.Event`` and its like: whether the stream has come this far."""

    def query(self) -> bool:
        """Return whether all work before the event has finished; does not block."""
        ...


@dataclass(slots=True)
class Wait:
    """A wait of this rank for a peer. On a device it ends when the stream has passed it, not when the host has.

    Attributes:
        position: boundary, direction and microbatch, or a collective and the compute that it is inside.
        peer: name of the ranks that are waited for.
        begin_s: start of the wait, on the monitor's clock.
        event: recorded behind the wait on the device's stream; None until the host has come that far.
        ended: whether the host knows that the wait is over.
    """

    position: str
    peer: str
    begin_s: float
    event: DeviceEvent | None = None
    ended: bool = False

    def is_over(self) -> bool:
        """Tell whether the wait has ended, on the host or on the device's stream."""
        try:
            return self.ended or (self.event is not None and self.event.query())
        except RuntimeError:
            # The device failed: its stream will never pass the wait.
            return False


class Position:
    """Where this rank is: its waits at boundaries and in collectives.

    Args:
        rank: this rank.
        clock_s: reads the monitor's clock.
    """

    def __init__(self, rank: int, clock_s: Callable[[], float]) -> None:
        self._rank = rank
        self._clock_s = clock_s
        self._waits: list[Wait] = []
        self._last_wait: Wait | None = None
        # The collective inside a compute that holds up this rank.
        self._inside: Wait | None = None
        self._name_compute: Callable[[], str] | None = None

    def begin(self, position: str, peer: str) -> Wait:
        """Start the clock of a wait; set ``ended`` or an ``event`` on the result when the host has passed.

        Args:
            position: boundary, direction and microbatch.
            peer: name of the ranks that are waited for.
        """
        wait = Wait(position, peer, self._clock_s())
        self._waits = [*self._open, wait]
        self._last_wait = wait
        return wait

    @contextlib.contextmanager
    def computing(self, name_compute: Callable[[], str]) -> Iterator[None]:
        """Watch collectives inside computes in a ``with`` block: their waits count as those at boundaries do.

        Args:
            name_compute: names the compute that is running; empty between two of them.
        """
        self._name_compute = name_compute
        try:
            yield
        finally:
            self._name_compute = self._inside = None

    def look(self) -> None:
        """Note whether a compute waits in a collective, and since when; called often, by the thread with the clock."""
        compute = self._compute
        collective = find_collective() if compute else None
        if collective is None:
            self._inside = None
            return
        position = f"{collective.name} inside {compute}"
        if self._inside is None or self._inside.position != position:
            others = [rank for rank in collective.ranks if rank != self._rank]
            self._inside = Wait(position, f"rank {some_ranks(others)}" if others else "other ranks", self._clock_s())

    def longer_than(self, limit_s: float) -> Wait | None:
        """Return a wait that has taken longer than a limit; None if there is none."""
        known = [*self._waits, *([self._inside] if self._inside is not None else [])]
        waits = (wait for wait in known if self._clock_s() - wait.begin_s > limit_s and not wait.is_over())
        return next(waits, None)

    def stand(self) -> Standing:
        """Return where this rank is, for others: at a boundary, in a collective, or elsewhere."""
        for wait in self._open:
            return Standing(text=f"waits at {wait.position} for {wait.peer}", peers=ranks_in(wait.peer))
        if (collective := self._collective()) is not None:
            return collective
        if compute := self._compute:
            return Standing(text=f"computes {compute}")
        last = "" if self._last_wait is None else f" (last at {self._last_wait.position})"
        return Standing(text=f"was not waiting at a boundary{last}")

    def describe(self, *, has_last: bool = True) -> str:
        """Describe where this rank is, for its own line: its current wait, or the boundary that it used last.

        Args:
            has_last: whether that one is said.

        Returns:
            The text; empty where there is nothing to say, before the first boundary.
        """
        now_s = self._clock_s()
        for wait in self._open:
            return f"this rank waited {now_s - wait.begin_s:.1f} s at {wait.position} for {wait.peer}"
        if (collective := self._collective()) is not None:
            return f"this rank {collective.text}"
        if has_last and (last := self._last_wait) is not None:
            ago_s = now_s - last.begin_s
            return f"this rank was not waiting at a boundary (last: {last.position}, {ago_s:.1f} s ago)"
        return ""

    @property
    def _open(self) -> list[Wait]:
        return [wait for wait in self._waits if not wait.is_over()]

    @property
    def _compute(self) -> str:
        name_compute = self._name_compute
        return "" if name_compute is None else name_compute()

    def _collective(self) -> Standing | None:
        collective = find_collective()
        if collective is None:
            return None
        of = f" of ranks {some_ranks([*collective.ranks])}" if collective.ranks else ""
        inside = f", inside {self._compute}" if self._compute else ""
        return Standing(
            text=f"stands in {collective.name}{of}{inside}",
            peers=tuple(rank for rank in collective.ranks if rank != self._rank),
            group=collective.ranks,
        )
