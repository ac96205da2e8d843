"""Ranks watch each other: signs of life, progress in joint work, early ends, and how the run ends.

Which ranks are alive, and where each of them waits.

Ranks are asked when a connection breaks, so that all of them name the rank that was killed, and when a rank has waited
too long, so that its line says who waits for whom.

A rank whose peer dies finds its connection closed and ends, too, which breaks more connections. Without asking, the
others would name the rank that noticed first.

Long work that all ranks do together, such as a save: it may take long, as long as some rank makes progress.

Inside a load or a save ranks wait for each other in many collectives of Megatron's and torch's own, which nobody times.
A rank may also write files for an hour, and the others wait for it with good reason. So what is timed here
is not a wait, but the lack of progress: every rank posts now and then that it makes progress, and if no rank of the
world does so for long enough, the run is stuck. A rank makes progress if the thread that trains uses the processor
outside a collective, or waits for a disk; or if a process that it has started does. A rank that is stuck outside a
collective is the one that the others wait for.

Finds a rank that has ended without an error, though others still need it.

Ranks need not end at the same time: some have more to do when training is over. So a rank that ends posts how many
joint operations it has begun, and each of the others compares that with its own number.

Liveness of the run: no rank hangs silently (docs/development/internals.md, contract 7).

``wait()`` on NCCL and HCCL does not block the host, a stopped process closes no connection, and a rank that is blocked
in a collective of Megatron's own never comes back to our code. So two small threads keep the time on every rank.
They only talk to the store, over a connection of their own.

* The *poller* shows a sign of life, looks for the next rank's (a ring: linear cost in the world size), and looks for a
  failure that some rank posted. Its calls may block for ever when the store's server is stopped.
* The *timer* ends the process when the poller found a failure, when the store does not answer, or when this rank has
  waited too long at a boundary. It never waits for the store.

To end is to write one line, with the boundary, direction, microbatch and waiting time, and to exit with an error.
Budget, as shares of the timeout: silence of a neighbour 0.6, of the store 0.65, stillness of all ranks in a load or a
save 0.7 (:class:`Together`), a wait of this rank 0.8; to inform the others and to end takes about 0.1 more. The clock
stands still while this process does, so a suspended or overloaded machine accuses nobody. All threads are there from
the beginning: without memory a process could not start one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.position import (
    COLLECTIVES,
    BlockedCall,
    Position,
    Standing,
    follow,
    load_standing,
    outwards,
)
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.runtime.health.startup_waiting import EXIT_CODE, report, some_ranks
from vtp_plugin.runtime.health.store import Board, Leaver, PostError, Topic, open_round, part_of, read_text


class Helper:
    """Runs actions one after another in a thread, for callers that wait for each only up to a limit.

    Attributes:
        thread: the thread, which the owner starts; it runs until :meth:`end`.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="vtp-monitor-helper", daemon=True)

    def run(self, action: Callable[[], None], limit_s: float) -> None:
        """Run an action, and return after the limit even if it, or an earlier one, is still running."""
        done = threading.Lock()
        done.acquire()
        self._tasks.put((action, done))
        done.acquire(timeout=limit_s)

    def end(self) -> None:
        """Let the thread end after its current action."""
        self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            action, done = task
            with contextlib.suppress(Exception):  # whoever asked continues without it
                action()
            done.release()


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


# A process that only polls now and then uses a smaller share of the time.
_BUSY_SHARE = 0.01
_MOST_SUSPECTS = 1000
_RANK = re.compile(r"[0-9]{1,9}")
_EXCHANGES = str(Path(__file__).parent)
# Fields of /proc/PID/stat behind the name, which may hold anything: state, and user and system time in ticks.
_STATE, _TIMES = 0, slice(11, 13)


class Together:
    """Notices that a load or a save makes no progress. All methods but :meth:`during` run in the monitor's threads.

    Args:
        store: store of the monitors.
        rank: this rank.
        limit_s: how long all ranks may be without progress.
        clock: reads the monitor's clock.
    """

    def __init__(self, store: dist.Store, rank: int, limit_s: float, clock: Callable[[], float]) -> None:
        self._store, self._rank, self._limit_s, self._clock = store, rank, limit_s, clock
        self._thread = _Thread()
        self._what: str | None = None
        self._begin_s = self._own_s = 0.0
        self._num_moves = 0
        self._is_named = False

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Watch the progress of all ranks while a block runs; a nested block is part of the outer one.

        Args:
            what: name of the work, for messages.
        """
        if self._what is not None:
            yield
            return
        self._begin_s, self._what = self._clock(), what
        try:
            yield
        finally:
            self._what = None

    def beat(self) -> str | None:
        """Tell the others whether this rank makes progress; return a reason to end if no rank does for too long."""
        now_s = self._clock()
        if self._thread.gets_on():
            self._own_s = now_s
            self._store.add("moves", 1)
        is_suspect = now_s - self._own_s > self._limit_s / 2 and not self._thread.waits_for_others()
        if is_suspect != self._is_named:
            self._is_named = is_suspect
            self._store.set(f"still/{self._rank}", "yes" if is_suspect else "")
            if is_suspect:
                self._store.set(f"suspect {self._store.add('suspects', 1)}", str(self._rank))
        if (what := self._what) is None:
            return None
        num_moves = self._store.add("moves", 0)
        if num_moves != self._num_moves:
            self._num_moves, self._begin_s = num_moves, now_s
        still_s = now_s - self._begin_s
        return None if still_s <= self._limit_s else f"{what} stood still for {still_s:.1f} s: {self._reason()}"

    def position(self) -> str | None:
        """Describe where this rank is, if it is in a load or a save."""
        what = self._what
        return None if what is None else f"this rank stood in {what}, {self._thread.position()}"

    def _reason(self) -> str:
        # Of very many, which no run has, the first will do.
        numbers = range(1, min(self._store.add("suspects", 0), _MOST_SUSPECTS) + 1)
        named = {self._read(f"suspect {number}") for number in numbers}
        ranks = sorted(int(rank) for rank in named if _RANK.fullmatch(rank) and self._read(f"still/{int(rank)}"))
        if not ranks:
            return "all ranks wait, in collectives that do not match"
        who = f"rank {ranks[0]} does" if len(ranks) == 1 else f"ranks {some_ranks(ranks)} do"
        return f"{who} nothing, and the others wait"

    def _read(self, key: str) -> str:
        """Read a post; empty if it is not there, since reading would wait for it."""
        return read_text(self._store, key) if self._store.check([key]) else ""


class _Thread:
    """The thread that creates this object: the one that trains."""

    def __init__(self) -> None:
        self._ident, self._number = threading.get_ident(), threading.get_native_id()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._seen_s, self._used_s, self._ticks = time.monotonic(), self._cpu_s(), self._of_children()[0]

    def gets_on(self) -> bool:
        """Tell whether the thread or a process that it has started worked since the last call, or waits for a disk."""
        now_s, used_s, (ticks, is_child_at_disk) = time.monotonic(), self._cpu_s(), self._of_children()
        least_s = _BUSY_SHARE * (now_s - self._seen_s)
        is_busy = used_s - self._used_s > least_s and not self.waits_for_others()
        has_busy_child = (ticks - self._ticks) / os.sysconf("SC_CLK_TCK") > least_s
        self._seen_s, self._used_s, self._ticks = now_s, used_s, ticks
        return is_busy or has_busy_child or is_child_at_disk or _is_at_disk(f"/proc/self/task/{self._number}")

    def waits_for_others(self) -> bool:
        """Tell whether the thread is inside torch.distributed, or in an exchange of the plugin over the store."""
        frame = self._frame()
        is_exchange = frame is not None and frame.f_code.co_filename.startswith(_EXCHANGES)
        return is_exchange or self._collective() is not None

    def position(self) -> str:
        """Describe in which collective the thread is and who called that, or where else it is."""
        frame = self._collective() or self._frame()
        if frame is None:
            return "at its end"
        caller = frame.f_back
        while caller is not None and "torch" in Path(caller.f_code.co_filename).parts:
            caller = caller.f_back
        shown = "" if caller is None else f", called by {_shown(caller)}"
        return f"in {_shown(frame)}{shown}"

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._ident)

    def _collective(self) -> FrameType | None:
        """Find the outermost function of torch.distributed that is running."""
        frames = [one for one in outwards(self._frame()) if one.f_code.co_filename.endswith(COLLECTIVES)]
        return frames[-1] if frames else None

    def _cpu_s(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return 0.0

    def _of_children(self) -> tuple[int, bool]:
        """Return the processor time of the processes that the thread has started, and whether one waits for a disk."""
        try:
            children = Path(f"/proc/self/task/{self._number}/children").read_text().split()
        except OSError:
            return 0, False
        ticks = 0
        for child in children:
            with contextlib.suppress(OSError, IndexError, ValueError):
                ticks += sum(map(int, _fields(f"/proc/{child}")[_TIMES]))
        return ticks, any(_is_at_disk(f"/proc/{child}") for child in children)


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_name} ({'/'.join(Path(code.co_filename).parts[-3:])}:{frame.f_lineno})"


def _fields(process: str) -> list[str]:
    return Path(f"{process}/stat").read_text().rpartition(")")[2].split()


def _is_at_disk(process: str) -> bool:
    """Tell whether a process or a thread waits for a disk."""
    try:
        return _fields(process)[_STATE] == "D"
    except (OSError, IndexError):
        return False


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

    def describe_position(self, error: BaseException | None = None) -> str:
        """Describe where this rank is: its current wait, a collective, or the boundary that it used last.

        Args:
            error: what this rank ends with; the boundary that it used last only matters if another rank is the cause.

        Returns:
            The end of a line, with what goes before it; empty where there is nothing to say.
        """
        is_own = not (error is None or self._failure or isinstance(error, PeerError) or is_lost_connection(error))
        where = self.together.position() or self.position.describe(has_last=not is_own)
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
