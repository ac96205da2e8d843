"""Which attempt of a run this is: a name on which its ranks agree, over a store that may have seen earlier attempts.

A launcher that starts the ranks again may keep its store. Its counts of restarts tell attempts apart only within one
agent: an agent that left and came back counts from zero, and a restart for a new member is not counted at all.

Rank 0 opens an attempt, under the next number. Each other rank takes its seat in the newest attempt, once; a seat that
is taken, or an attempt of another size, is an earlier one, and the rank waits for the next. When all seats are taken,
rank 0 says so. A rank whose attempt was left by its rank 0 hears nothing, sees a newer attempt, and takes a seat there.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.store import Topic, count, part_of
from vtp_plugin.runtime.health.store_posts import PostError, read_post, read_text
from vtp_plugin.runtime.health.waiting import (
    JUDGE_SHARE,
    STORE_KEEPER,
    UNKNOWN_PEER,
    WAITED,
    WaitingLines,
    poll,
    some_ranks,
    until_store_ends,
)

_LOOK_S = 0.05
_MOST_RANKS = 1 << 16  # rank 0 deletes a key for each
# The store's server is one thread: all ranks together look at most this often.
_MAX_LOOKS_PER_S = 4000


@until_store_ends(STORE_KEEPER, "start")
def agree_on_attempt(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> str:
    """Agree with the other ranks of this attempt on its name.

    Args:
        store: reaches all ranks, and may hold what earlier attempts have posted.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for the others.

    Returns:
        A number, as text, which no earlier attempt in this store had.

    Raises:
        PeerError: a rank did not come, or somebody has posted what is no attempt.
    """
    if world_size == 1:
        return str(count(part_of(store, Topic.ATTEMPTS), "count"))
    table = _Table(part_of(store, Topic.ATTEMPTS), max(_LOOK_S, world_size / _MAX_LOOKS_PER_S))
    begin_s = time.monotonic()
    if rank == 0:
        return str(table.open(world_size, begin_s, timeout_s))
    return str(table.enter(rank, world_size, begin_s, timeout_s))


@dataclass(frozen=True, slots=True)
class _Table:
    """The attempts in a store.

    Attributes:
        part: part of the store that belongs to this topic.
        pause_s: seconds between two reads.
    """

    part: dist.Store
    pause_s: float

    def open(self, world_size: int, begin_s: float, timeout_s: float) -> int:
        """Open the next attempt on rank 0, and return its number once all ranks are there."""
        number = count(self.part, "count")
        self._clear()
        self.part.set("newest", json.dumps([number, world_size]))
        seats = [f"{number} seat {rank}" for rank in range(1, world_size)]

        def missing() -> list[int]:
            return [rank for rank, seat in enumerate(seats, 1) if not self.part.check([seat])]

        limit_s = JUDGE_SHARE * timeout_s
        lines = WaitingLines(limit_s, lambda: f"rank {some_ranks(missing())} at start")
        error = ""
        if not poll(lambda: self.part.check(seats), limit_s, pause_s=self.pause_s, lines=lines):
            # A rank that comes from now on must not take a seat in what is over.
            late = [rank for rank, seat in enumerate(seats, 1) if self._take(seat, "-")]
            if late:
                waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
                error = f"{waited} for rank {some_ranks(late)} at start: no answer; {UNKNOWN_PEER}"
        self.part.set(f"{number} is", error or "whole")
        if error:
            raise PeerError(error, shared=error)
        return number

    def enter(self, rank: int, world_size: int, begin_s: float, timeout_s: float) -> int:
        """Take a seat on another rank, and return the attempt's number once all ranks are there."""
        own, last, found = uuid.uuid4().hex, 0, 0

        def is_whole() -> bool:
            nonlocal last, found
            newest, size = self._newest()
            if newest > last:
                last = newest
                if found:  # a seat in what was cleared meanwhile
                    self.part.delete_key(f"{found} seat {rank}")
                is_mine = size == world_size and self._take(f"{newest} seat {rank}", own)
                found = newest if is_mine else 0
            return found > 0 and self.part.check([f"{found} is"])

        lines = WaitingLines(timeout_s, lambda: f"{'another rank' if found else 'rank 0'} at start")
        if not poll(is_whole, timeout_s, pause_s=self.pause_s, lines=lines):
            whom = "rank 0, which still waits for another rank," if found else "rank 0"
            waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
            text = f"{waited} for {whom} at start: no answer; {UNKNOWN_PEER}"
            raise PeerError(text, shared=text)
        outcome = read_text(self.part, f"{found} is")
        if not outcome:
            raise PostError(Topic.ATTEMPTS.key, f"{found} is", "is empty")
        if outcome != "whole":
            raise PeerError(outcome, shared=outcome)
        return found

    def _newest(self) -> tuple[int, int]:
        """Return the number of the newest attempt, and of its ranks; 0 if there is none."""
        if not self.part.check(["newest"]):
            return 0, 0
        number, size = read_post(tuple[int, int], self.part, "newest", Topic.ATTEMPTS.key)
        if number < 1 or not 1 < size <= _MOST_RANKS:
            raise PostError(Topic.ATTEMPTS.key, "newest", f"is attempt {number} of {size} ranks, which is none")
        return number, size

    def _take(self, seat: str, name: str) -> bool:
        return self.part.compare_set(seat, "", name) == name.encode()

    def _clear(self) -> None:
        """Delete what the last attempt has left, so that a store does not grow with attempts."""
        number, size = self._newest()
        for key in (f"{number} is", *(f"{number} seat {rank}" for rank in range(1, size))):
            self.part.delete_key(key)
