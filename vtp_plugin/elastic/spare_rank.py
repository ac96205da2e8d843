"""How a process that does not belong to a run learns that the run has ended, well or badly."""

from __future__ import annotations

import time

import torch.distributed as dist

from vtp_plugin.runtime.health.board import Board
from vtp_plugin.runtime.health.monitor import DONE
from vtp_plugin.runtime.health.store import Round, Topic, connect_again, part_of
from vtp_plugin.runtime.health.waiting import AwakeClock, poll

_LOOK_S = 1.0


class SpareRank:
    """Waits for the end of a run outside it, by reading what the run's monitors write.

    Args:
        store: store of the run.
        num_ranks: number of ranks of the run.
        timeout_s: timeout of the run: if its ranks stop showing signs of life, the run ends within it.
    """

    def __init__(self, store: dist.Store, *, num_ranks: int, timeout_s: float) -> None:
        self._part = part_of(store, Topic.CARDS)
        self._store = store
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s

    def leave(self) -> None:
        """Note that this rank of the run has ended well; its process calls it last."""
        self._part.add("ended", 1)

    def let_go(self, *, keeps_store: bool, num_others: int, limit_s: float) -> None:
        """Note that this process needs the store no longer; one that keeps it waits for the others.

        Args:
            keeps_store: whether this process serves the store.
            num_others: number of other processes that use the store.
            limit_s: how long to wait for them.
        """
        if keeps_store:
            poll(lambda: self._part.add("left", 0) >= num_others, limit_s, pause_s=0.1)
        else:
            self._part.add("left", 1)

    def wait(self) -> str | None:
        """Wait for the end of the run. Return why it failed; None if all its ranks ended well."""
        life, silence = -1, AwakeClock()
        watched: dist.Store | None = None
        try:
            while self._part.add("ended", 0) < self._num_ranks:
                if watched is None and part_of(self._store, Topic.WATCH).check(["name"]):
                    watched = Round(part_of(connect_again(self._store), Topic.WATCH), 1).posts
                if watched is None:
                    # Ranks that are still starting end by themselves if one of them does not come.
                    silence = AwakeClock()
                else:
                    if (failure := Board(watched).read().failure) is not None:
                        return failure
                    seen = watched.add("life/0", 0)
                    if seen != life or seen >= DONE:
                        life, silence = seen, AwakeClock()
                if self._num_ranks > 1 and silence.seconds() > self._timeout_s:
                    return f"rank 0 showed no sign of life for {self._timeout_s:.0f} s"
                time.sleep(_LOOK_S)
        except RuntimeError:
            return "the store of the run is gone"
        return None
