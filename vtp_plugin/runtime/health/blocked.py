"""Finds out whether the script is in a collective operation that a rank which has ended can never join."""

from __future__ import annotations

from vtp_plugin.runtime.health.who_waits import BlockedCollective, find_collective

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
