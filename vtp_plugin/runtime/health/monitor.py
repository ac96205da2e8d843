"""Liveness of the run: no rank hangs silently (docs/development/internals.md, contract 7).

``wait()`` on NCCL and HCCL does not block the host, a stopped process closes no connection, and a rank that is blocked
in a collective of Megatron's own never comes back to our code. So two small threads keep the time on every rank.
They only talk to the store, over a connection of their own.

* The *poller* shows a sign of life, looks for the next rank's (a ring: linear cost in the world size), and looks for a
  failure that some rank posted. Its calls may block for ever when the store's server is stopped.
* The *timer* ends the process when the poller found a failure, when the store does not answer, or when this rank has
  waited too long at a boundary. It never waits for the store.

To end is to write one line, with the boundary, direction, microbatch and waiting time, and to exit with an error.
Budget, as shares of the timeout: silence of a neighbour 0.6, of the store 0.65, stillness of all ranks in a load or a
save 0.7 (``joint_work.py``), a wait of this rank 0.8; to inform the others and to end takes about 0.1 more. The clock
stands still while this process does, so a suspended or overloaded machine accuses nobody. All threads are there from
the beginning: without memory a process could not start one.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.runtime.health.board import Board
from vtp_plugin.runtime.health.early_exit import EarlyExits
from vtp_plugin.runtime.health.joint_work import Together
from vtp_plugin.runtime.health.liveness_check import LivenessCheck, is_lost_connection
from vtp_plugin.runtime.health.position import Position
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.runtime.health.spare_thread import Helper
from vtp_plugin.runtime.health.store import Topic, open_round, part_of
from vtp_plugin.runtime.health.waiting import EXIT_CODE, report
from vtp_plugin.runtime.health.who_waits import follow

DONE = 1 << 40
"""Added to a sign of life by a rank that ends; more than any number of beats."""
_MAX_LOOKS_PER_S = 2000  # of all ranks together: the store's server is one thread
# Seconds in which a process may print and clean up after its own error.
_FAILING_S = 30.0


class Monitor:
    """Keeps the time of one rank. Create after all ranks agreed to start; ``stop`` before a normal end.

    Args:
        store: a connection to the run's store that nobody else uses (``connect_again``), opened before the ranks
            agreed: opening one can take seconds, in which this rank would seem silent.
        rank: global rank.
        world_size: number of ranks.
        timeout_s: if a rank dies, stops or hangs, all others end within this time.
        keeper: name of the process that keeps the store, for messages.
        describe: turns an error into the line that other ranks may read.
        hint: returns the end of the line with which this process ends because of others, such as how to resume.
        exit_process: ends the process; replaced in tests.
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        keeper: str = "the launcher or rank 0",
        describe: Callable[[BaseException], str] = describe_error,
        hint: Callable[[], str] = str,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        """Prepare; the threads run after :meth:`start`."""
        # The same store may have carried an earlier run of this process.
        self._store = open_round(part_of(store, Topic.WATCH), rank).posts
        self._rank = rank
        self._world_size = world_size
        self.timeout_s = timeout_s
        self._dead_s = 0.6 * timeout_s
        self._beat_interval_s = min(15.0, timeout_s / 20)
        self._look_interval_s = min(self._beat_interval_s, max(1.0, world_size / _MAX_LOOKS_PER_S))
        self._keeper = keeper
        self._board = Board(self._store)
        self._liveness_check = LivenessCheck(self._store, self._board, rank, world_size)
        self.together = Together(self._store, rank, 0.7 * timeout_s, lambda: self._clock_s)
        self._absent: list[int] = []
        self.early_exits = EarlyExits(rank)
        self._helper = Helper()
        self._describe = describe
        self._hint = hint
        self._exit_process = exit_process
        self._clock_s = 0.0
        self._contact_s = 0.0
        self._cut_s: float | None = None
        self._failing_s: float | None = None
        self._failure: str | None = None
        self._stood_s = 0.0
        self.position = Position(rank, lambda: self._clock_s)
        self._farewell_lock = threading.Lock()
        self._said_farewell = False
        self._stopping, self._timer_ends = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads."""
        for target in (self._poll, self._keep_time):
            name = f"vtp-monitor-{target.__name__.strip('_')}"
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        self._threads.append(self._helper.thread)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell the others that this rank ends, and end the threads.

        Rank 0, which may keep the store, leaves last: it waits, still watching, until all others are done. After its
        own failure it waits only until they can know, and its timer keeps running: a process may hang at exit.
        """
        if self._stopping.is_set():
            return
        self._try(self._leave_others)
        self._stopping.set()
        if self._failing_s is None:
            self._timer_ends.set()
            self._helper.end()
        for thread in self._threads if self._failing_s is None else self._threads[:1]:
            # A thread that comes back from the store while the interpreter ends would abort the process.
            thread.join(timeout=2 * self._beat_interval_s + 1.0)

    def _leave_others(self) -> None:
        if self._failing_s is None:
            self._board.leave(self.early_exits.goodbye())
        self._store.add(f"life/{self._rank}", DONE)
        self._say_farewell()
        if self._rank == 0:
            self._await_farewells(None if self._failing_s is None else self._linger_s)

    def post_failure(self, error: BaseException) -> bool:
        """Tell the others that this rank fails, so that they need not wait until its silence is noticed.

        A broken connection may be the consequence of another rank's end: then all are asked whether they live. This
        takes at most a second, or a quarter of the timeout. Afterwards this rank has some time to print its error and
        end.

        Returns:
            Whether the error is a connection that broke, and it is known who failed before.
        """
        if self._failing_s is None:
            self._failing_s = self._clock_s
        is_broken = is_lost_connection(error)
        if is_broken:
            limit_s = min(2 * self._look_interval_s + 1.0, 0.25 * self.timeout_s)
            self._run_bounded(lambda: self._find_absent(limit_s), limit_s + 0.5)
        text = f"rank {self._rank} failed: {self._describe(error)}"
        if self._absent:
            who = ", ".join(map(str, self._absent))
            does = "does" if len(self._absent) == 1 else "do"
            text = f"rank {who} {does} not answer: ended, was killed or stopped (noticed by rank {self._rank})"
            self._failure = text
        elif is_broken and (early_end := self.early_exits.describe_early_end("lost a connection")):
            self._failure = text = early_end
        self._run_bounded(lambda: self._post(text), 1.0)
        if self._cut_s is not None and self._failure is None:
            self._failure = f"{self._keeper} ended, which kept the store"
        return self._failure is not None and is_broken

    def _find_absent(self, limit_s: float) -> None:
        # A rank that has left told so before its connections closed.
        self.early_exits.note(self._board.read().leaver, self._clock_s)

        def has_left(rank: int) -> bool:
            return self._store.add(f"life/{rank}", 0) >= DONE

        self._absent = self._liveness_check.absent(
            limit_s, is_over=lambda: self._failure is not None, has_left=has_left
        )

    @property
    def is_failing(self) -> bool:
        """Whether this rank itself has failed."""
        return self._failing_s is not None

    @property
    def failure(self) -> str | None:
        """The first failure that was posted, once known; None also if it was this rank's."""
        return self._failure

    def describe_position(self) -> str:
        """Describe where this rank is: its current wait, a collective, or the boundary that it used last.

        Returns:
            The end of a line, with what goes before it; empty where there is nothing to say.
        """
        where = self.together.position() or self.position.describe()
        parts = [where] if where else []
        if self._stood_s > 0.3 * self.timeout_s:  # so long that others may have missed it
            parts.append(f"it stood still for {self._stood_s:.1f} s before (stopped or suspended)")
        return "".join(f"; {part}" for part in parts)

    @property
    def _linger_s(self) -> float:
        """Seconds that rank 0 keeps the store so that the others learn of a failure."""
        return 2.5 * self._look_interval_s

    def _poll(self) -> None:
        self._try(self._watch_others)

    def _watch_others(self) -> None:
        neighbour = (self._rank + 1) % self._world_size
        next_beat_s, life, life_s = 0.0, 0, 0.0
        while not self._stopping.is_set():
            now_s = self._clock_s
            if now_s >= next_beat_s:
                next_beat_s = now_s + self._beat_interval_s
                self._store.add(f"life/{self._rank}", 1)
                seen = self._store.add(f"life/{neighbour}", 0)
                if seen != life or seen >= DONE:
                    life, life_s = seen, now_s
                elif now_s - life_s > self._dead_s:
                    self._post(f"rank {neighbour} does not answer: no sign of life for {now_s - life_s:.1f} s")
                if reason := self.together.beat():
                    self._post(reason)
            notices = self._board.read()
            self._liveness_check.answer(notices.num_calls, self.position.stand)
            self.early_exits.note(notices.leaver, self._clock_s)
            if self._failure is None and notices.failure is not None:
                self._failure = notices.failure  # first: when all have said farewell, the store may be gone
                self._say_farewell()
            self._contact_s = self._clock_s
            self._stopping.wait(self._look_interval_s)

    def _keep_time(self) -> None:
        pause_s = self._look_interval_s / 4
        last_s = time.monotonic()
        while not self._timer_ends.wait(pause_s):
            now_s = time.monotonic()
            self._clock_s += min(now_s - last_s, 4 * pause_s)
            self._stood_s = max(self._stood_s, now_s - last_s - 4 * pause_s)
            last_s = now_s
            try:
                self.position.look()
                reason = self._reason_to_end()
            except (MemoryError, RuntimeError, ValueError):
                continue  # out of memory, or a group that the script destroys just now: time goes on
            if reason is not None:
                self._end(reason)
                return

    def _reason_to_end(self) -> str | None:
        """Return why this process must end, from what is known in it; None if it need not."""
        now_s = self._clock_s
        if self._failing_s is not None:
            if now_s - self._failing_s <= min(_FAILING_S, 0.3 * self.timeout_s):
                return None
            return f"this rank failed and did not end by itself{self.describe_position()}"
        if self._failure is not None:
            return f"{self._failure}{self.describe_position()}"
        silent_s = now_s - self._contact_s
        # A rank that loses a peer often loses the store, too, and the error from the peer says more than this one.
        is_cut = self._cut_s is not None and now_s - self._cut_s > min(2.0, 0.1 * self.timeout_s)
        if is_cut or silent_s > self._dead_s + self._beat_interval_s:
            return self._describe_silence(silent_s)
        if not self._stopping.is_set() and (early_end := self.early_exits.find_early_end(now_s)) is not None:
            self._run_bounded(lambda: self._post(early_end), 1.0)
            return f"{self._failure or early_end}{self.describe_position()}"
        return self._find_long_wait(now_s)

    def _describe_silence(self, silent_s: float) -> str:
        silence = f"no contact for {silent_s:.1f} s with the store that"
        if self._keeper == f"rank {self._rank}":
            return f"{silence} this rank keeps{self.describe_position()}"
        return f"{self._keeper} ended or stopped: {silence} it keeps{self.describe_position()}"

    def _find_long_wait(self, now_s: float) -> str | None:
        wait = self.position.longer_than(0.8 * self.timeout_s)
        if wait is None:
            return None
        others: list[str] = []
        limit_s = min(2 * self._look_interval_s + 1.0, 0.1 * self.timeout_s)
        self._run_bounded(lambda: others.append(self._follow_waits(limit_s)), limit_s + 0.5)
        if self._failure is not None:
            return f"{self._failure}{self.describe_position()}"
        reason = f"waited {now_s - wait.begin_s:.1f} s at {wait.position} for {wait.peer}: no answer{''.join(others)}"
        self._run_bounded(lambda: self._post(f"rank {self._rank} {reason}"), 1.0)
        return f"{reason}; look for a rank that ended, stopped or runs another schedule"

    def _follow_waits(self, limit_s: float) -> str:
        """Ask all ranks where they wait, and follow the waits, starting at this rank."""
        self._find_absent(limit_s)
        return follow(
            self._rank,
            self.position.stand(),
            lambda rank: None if rank in self._absent else self._liveness_check.standing(rank),
        )

    def _end(self, reason: str) -> None:
        try:
            self._run_bounded(self._say_farewell, 1.0)
            report(self._rank, f"{reason}{self._hint()}", is_consequence=self._failure is not None)
            # Helpers of a checkpoint save would outlive this process and keep its output open.
            for child in multiprocessing.active_children():
                child.kill()
            if self._rank == 0:
                self._run_bounded(lambda: self._await_farewells(self._linger_s), self._linger_s + 0.1)
            self._stopping.set()
        finally:
            self._exit_process(EXIT_CODE)

    def _post(self, text: str) -> None:
        """Post a failure if it is the first; otherwise note the first, of which this may be a consequence."""
        if (first := self._board.post(text)) != text:
            self._failure = first

    def _say_farewell(self) -> None:
        """Tell, once, that this rank no longer needs the store."""
        with self._farewell_lock:
            if not self._said_farewell:
                self._said_farewell = True
                self._store.add("farewells", 1)

    def _await_farewells(self, limit_s: float | None) -> None:
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        while self._store.add("farewells", 0) < self._world_size:
            if deadline_s is not None and time.monotonic() > deadline_s:
                return
            time.sleep(0.02)

    def _try(self, action: Callable[[], None]) -> None:
        """Use the store unless its connection is known to be broken: torch reports every failing call at length.

        A broken connection stays broken. The timer ends the process if it does not end by itself.
        """
        if self._cut_s is None:
            try:
                action()
            except RuntimeError:
                self._cut_s = self._clock_s

    def _run_bounded(self, action: Callable[[], None], limit_s: float) -> None:
        """Use the store, and go on without it when it does not answer in time."""
        self._helper.run(lambda: self._try(action), limit_s)
