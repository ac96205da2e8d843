"""Finds a rank that has ended without an error, though others still need it.

Ranks need not end at the same time: some have more to do when training is over. So a rank that ends posts how many
joint operations it has begun, and each of the others compares that with its own number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from vtp_plugin.runtime.health.blocked import BlockedCall
from vtp_plugin.runtime.health.board import Leaver

# Seconds that a joint operation may take once the last rank has come.
_PATIENCE_S = 3.0


class EarlyExits:
    """Counts joint operations, which all ranks do together: checks, steps, evaluations.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_passes = 0
        self._is_inside = False
        self._leaver: Leaver | None = None
        self._left_s = 0.0
        self._blocked = BlockedCall()

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Do one joint operation. A rank that leaves it by an exception, and then ends, has left the others alone."""
        self._num_passes += 1
        self._is_inside = True
        yield
        self._is_inside = False

    def goodbye(self) -> Leaver:
        """Return how far this rank came."""
        return Leaver(rank=self._rank, num_passes=self._num_passes, is_inside=self._is_inside)

    def note(self, leaver: Leaver | None, now_s: float) -> None:
        """Note the rank that was the first to end, once it has."""
        if self._leaver is None and leaver is not None and leaver.rank != self._rank:
            self._left_s, self._leaver = now_s, leaver

    def find_early_end(self, now_s: float) -> str | None:
        """Describe which rank has ended although this one needs it, and what for; None if none has."""
        leaver = self._leaver
        if leaver is None:
            return None
        if self._num_passes > leaver.num_passes:
            return self.describe_early_end("began what it did not begin")
        is_left = leaver.is_inside and self._is_inside and self._num_passes == leaver.num_passes
        if is_left and now_s - self._left_s > _PATIENCE_S:
            return self.describe_early_end("was in the step that it left")
        operation = self._blocked.name(leaver.rank, now_s, _PATIENCE_S)
        return None if operation is None else self.describe_early_end(f"waited for it in torch.distributed.{operation}")

    def describe_early_end(self, what: str) -> str | None:
        """Describe which rank has ended although this one did something that needs it; None while none has."""
        if self._leaver is None:
            return None
        return (
            f"rank {self._leaver.rank} has ended without an error and too early: rank {self._rank} {what}; see why the "
            "script ends there (sys.exit, fewer steps)"
        )
