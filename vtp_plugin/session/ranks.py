"""What all ranks of a run do outside its process groups: meet, compare what they are about to do, watch each other."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.disclosure import Disclosure
from vtp_plugin.runtime.measure import Report, share_reports
from vtp_plugin.runtime.monitor import Monitor
from vtp_plugin.runtime.rendezvous import open_store
from vtp_plugin.runtime.startup import agree


class AllRanks:
    """What this rank does together with all others, over a store.

    Args:
        timeout_s: says how long to wait for another rank; asked each time, since a check may change it.
        finish: what this rank has to do before it leaves, if no rank has failed.

    Attributes:
        store: reaches all ranks; None before the first check.
        monitor: keeps the time; None before the ranks have agreed, and after the end.
        disclosure: what this rank may tell the others; the least of it while nobody knows how many sites there are.
    """

    def __init__(self, timeout_s: Callable[[], float], finish: Callable[[], None]) -> None:
        self.store: dist.Store | None = None
        self.monitor: Monitor | None = None
        self.disclosure = Disclosure()
        self._timeout_s = timeout_s
        self._finish = finish
        self._rank, self._world_size = 0, 1

    def meet(self, environment: Mapping[str, str], prepare: Callable[[], Mapping[str, object]]) -> None:
        """Wait for all ranks that the launcher started, if it says where they meet, and compare what they were told.

        Args:
            environment: of this process.
            prepare: returns what this rank was told.

        Raises:
            ConfigError: a rank was told something else.
            PeerError: a rank did not come within the timeout.
        """
        rank, world_size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
        is_launched = rank.isdigit() and world_size.isdigit() and "MASTER_ADDR" in environment
        if dist.is_initialized() or not is_launched or int(world_size) < 2:
            return
        store = open_store(int(rank), int(world_size), self._timeout_s())
        self.agree(store, prepare, rank=int(rank), world_size=int(world_size), name="start")

    def agree(
        self,
        store: dist.Store,
        prepare: Callable[[], Mapping[str, object]],
        *,
        rank: int,
        world_size: int,
        name: str = "start-up check",
        timeout_s: float | None = None,
        is_partial: bool = False,
    ) -> None:
        """Run a check on all ranks, go on only if all succeed and agree, then begin to watch the others.

        Args:
            store: reaches all ranks.
            prepare: the check; what it returns must be equal on all ranks.
            rank: own rank.
            world_size: number of ranks.
            name: of the check, for error messages.
            timeout_s: for the check; default is the configured one, which the check itself may change.
            is_partial: a rank need not state every value that another one states.
        """
        limit_s = self._timeout_s() if timeout_s is None else timeout_s
        monitor_store = store.clone() if self.monitor is None else None
        self.store, self._rank, self._world_size = store, rank, world_size  # the check may use them
        agree(
            store,
            name,
            prepare,
            rank=rank,
            world_size=world_size,
            timeout_s=limit_s,
            is_partial=is_partial,
            disclosure=lambda: self.disclosure,
        )
        if monitor_store is not None:
            self.monitor = Monitor(
                monitor_store,
                rank=rank,
                world_size=world_size,
                timeout_s=self._timeout_s(),
                keeper=_store_keeper(os.environ),
                describe=lambda error: self.disclosure.describe(error),
            )
            self.monitor.start()
            atexit.register(self.stop)

    def agree_again(self, prepare: Callable[[], Mapping[str, object]], *, name: str, is_partial: bool = False) -> None:
        """Run a further check over the store of the first one; arguments as for :meth:`agree`."""
        assert self.store is not None
        self.agree(self.store, prepare, rank=self._rank, world_size=self._world_size, name=name, is_partial=is_partial)

    def agree_on_step(self, prepare: Callable[[], Mapping[str, object]]) -> None:
        """Run a function on all ranks; go on only if it returns the same everywhere."""
        self.agree_again(prepare, name="planning of a step")

    def share_reports(self, own: Report, combine: Callable[[Sequence[Report]], str]) -> str:
        """Make one text of all ranks' reports, on rank 0, and return it on all."""
        assert self.store is not None
        return share_reports(
            self.store, own, combine, rank=self._rank, world_size=self._world_size, timeout_s=self._timeout_s()
        )

    def stop(self) -> None:
        """End the watch over the other ranks; they are told that this rank is done."""
        atexit.unregister(self.stop)
        monitor, self.monitor = self.monitor, None
        if monitor is None:
            return
        monitor.stop()
        if not monitor.is_failing:
            # The last pass may have been an evaluation, whose sends nobody has waited for: what is still under way when
            # the process ends is lost.
            with contextlib.suppress(PeerError):
                self._finish()


def _store_keeper(environment: Mapping[str, str]) -> str:
    """Say whose end takes the run's store away."""
    if "MASTER_ADDR" not in environment:
        return "the launcher or rank 0"
    return "the launcher" if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "rank 0"
