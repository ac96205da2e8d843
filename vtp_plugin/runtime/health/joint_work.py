"""Long work that all ranks do together, such as a save: it may take long, as long as some rank makes progress.

Inside a load or a save ranks wait for each other in many collectives of Megatron's and torch's own, which nobody times.
A rank may also write files for an hour, and the others wait for it with good reason. So what is timed here
is not a wait, but the lack of progress: every rank posts now and then that it makes progress, and if no rank of the
world does so for long enough, the run is stuck. A rank makes progress if the thread that trains uses the processor
outside a collective, or waits for a disk; or if a process that it has started does. A rank that is stuck outside a
collective is the one that the others wait for.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from vtp_plugin.runtime.health.store_posts import read_text
from vtp_plugin.runtime.health.waiting import some_ranks
from vtp_plugin.runtime.health.who_waits import COLLECTIVES, outwards

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
