"""Which ranks are alive, and where each of them waits.

Ranks are asked when a connection breaks, so that all of them name the rank that was killed, and when a rank has waited
too long, so that its line says who waits for whom.

A rank whose peer dies finds its connection closed and ends, too, which breaks more connections. Without asking, the
others would name the rank that noticed first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.runtime.health.board import Board
from vtp_plugin.runtime.health.store_posts import PostError
from vtp_plugin.runtime.health.who_waits import Standing, load_standing

# Torch and its backends have no common exception type for this, and checkpoints wrap what they raise.
_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|connection to .* broke|"
    r"(nccl|hccl)\w* ?error|remote (error|process|peer)",
    re.IGNORECASE,
)
# Digits of the number of a check.
_MOST_DIGITS = 9


def is_lost_connection(error: BaseException) -> bool:
    """Tell whether an error may be the consequence of another rank's end.

    >>> is_lost_connection(RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:36494"))
    True
    >>> is_lost_connection(ValueError("bad sample"))
    False
    """
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, dist.DistError) or _LOST.search(str(link)):
            return True
        link = link.__cause__ or link.__context__
    return False


class LivenessCheck:
    """Asks all ranks for an answer. The board counts the checks, and every rank's monitor looks there.

    Args:
        store: store of the monitors.
        board: board of the monitors.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, board: Board, rank: int, world_size: int) -> None:
        self._store = store
        self._board = board
        self._rank = rank
        self._world_size = world_size
        self._num_answered = 0

    def answer(self, num_calls: int, stand: Callable[[], Standing]) -> None:
        """Answer all checks so far with where this rank stands; called by the thread that shows the sign of life."""
        if num_calls > self._num_answered:
            self._num_answered = num_calls
            self._store.set(f"here/{self._rank}", f"{num_calls} {stand().dump()}")
            self._store.add(f"answers/{num_calls}", 1)

    def absent(self, limit_s: float, *, is_over: Callable[[], bool], has_left: Callable[[int], bool]) -> list[int]:
        """Ask all ranks, and return those that did not answer within the limit.

        Args:
            limit_s: how long to wait for answers.
            is_over: tells whether the answer is no longer needed.
            has_left: tells whether a rank has ended normally, and so cannot answer.
        """
        number = self._board.call_all()
        deadline_s = time.monotonic() + limit_s
        while self._store.add(f"answers/{number}", 0) < self._world_size:
            if is_over():
                return []
            if time.monotonic() > deadline_s:
                return [rank for rank in range(self._world_size) if not self._is_here(rank, number, has_left)]
            time.sleep(0.05)
        return []

    def _is_here(self, rank: int, number: int, has_left: Callable[[int], bool]) -> bool:
        return has_left(rank) or self._last_answer(rank)[0] >= number

    def standing(self, rank: int) -> Standing | None:
        """Return where a rank stood at its last answer; None if it never answered."""
        return self._last_answer(rank)[1]

    def _last_answer(self, rank: int) -> tuple[int, Standing | None]:
        """Read the number of the last check that a rank has answered, and its answer; an invalid one counts as none."""
        key = f"here/{rank}"
        if not self._store.check([key]):
            return 0, None
        number, _, standing = self._store.get(key).partition(b" ")
        if not number.isdigit() or len(number) > _MOST_DIGITS:
            return 0, None
        try:
            found = load_standing(standing)
        except PostError:
            return 0, None
        # Each is asked for, so none may come a million times.
        is_sound = all(
            len(ranks) <= self._world_size and {*ranks} <= {*range(self._world_size)}
            for ranks in (found.peers, found.group)
        )
        return int(number), found if is_sound else None
