"""Kill a rank, or the process that saves for it, at a named point of a save; and controls: saves that are wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

from tests.multiproc.hooks.in_place import Facts, around, before
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.save import atomic_dir, saving
from vtp_plugin.checkpoint.save.atomic_dir import PARTIAL, InParts

ORDER = "VTP_TEST_KILL"
"""The variable with what is to happen, as JSON: ``point``; ``save``, the iteration that is saved; ``rank`` that comes
there, or None for any; ``victim``, the rank whose training process is killed instead of the process that comes there;
``start``, the iteration that the run goes on from; ``mutant``, one of :data:`MUTANTS`, or empty; ``log``; and ``act``,
a command to run in the place of a kill."""
SHARED = (
    "before manifest", "after manifest", "before the move", "before tracker", "half of the tracker", "after tracker",
    "clean-up",
)  # fmt: skip
"""Points of the rank that publishes."""
CLEARING, REPLACED = "clearing away", "removing a replaced one"
"""Points at which something must be there that goes: what a stopped save has left, or a checkpoint of that iteration.
Every rank may come to the first, and whoever publishes to the second."""
OF_PIECES = ("before a shard", "half a shard", "between shards")
OF_CLAIMS = ("claimed",)
"""Points of ``torch``: a rank has noted that it hashes the files of a folder."""
OF_INDEX = ("before metadata", "after metadata")
"""Points of ``torch_dist`` on rank 0."""
MUTANTS = ("early tracker", "skipped shard")


class _Killer:
    """Strikes once, in this process or in one that it forks."""

    def __init__(self) -> None:
        self.order = json.loads(os.environ[ORDER])
        self.rank, self.process = int(os.environ["RANK"]), os.getpid()
        self.iteration = self.order.get("start", 0)  # that is saved here
        self.published = 0  # the iteration that was published last: a thread cleans up while the next one begins
        self.pieces = 0  # that were begun in this save
        self._file(self.rank).write_text(str(self.process))

    def _file(self, rank: int) -> Path:
        return Path(f"{self.order['log']}.{rank}")

    def is_due(self, point: str) -> bool:
        """Tell whether it is to happen here and now."""
        order, iteration = self.order, self.published if point == "clean-up" else self.iteration
        return (order["point"], order["save"]) == (point, iteration) and order["rank"] in (self.rank, None)

    def strike(self, point: str) -> None:
        """End a process if its time has come; the log outlives it."""
        if not self.is_due(point):
            return
        here = {"point": point, "iteration": self.order["save"], "rank": self.rank}
        try:
            with Path(self.order["log"]).open("x") as log:
                log.write(json.dumps({**here, "is_in_worker": os.getpid() != self.process}))
        except FileExistsError:  # another process of the rank was first: Megatron 0.12 writes with two
            return
        victim = self.order.get("victim")
        if act := self.order.get("act"):
            subprocess.run(act, shell=True, check=True)
        else:
            os.kill(os.getpid() if victim is None else int(self._file(victim).read_text()), signal.SIGKILL)

    def around(self, owner: Any, name: str, before: str = "", after: str = "", only: str = "") -> None:
        @around(owner, name)
        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            is_meant = only in str(args[0]) if only else True
            if is_meant and before:
                self.strike(before)
            result = original(*args, **kwargs)
            if is_meant and after:
                self.strike(after)
            return result


def kill_in_save(facts: Facts) -> None:
    """Do what the order says."""
    from vtp_plugin.patches.core.dist_checkpointing.strategies import filesystem_async as pieces

    killer = _Killer()
    _count(killer, pieces)
    _watch_pieces(killer, pieces)
    _watch_files(killer)
    _know_which(killer, saving.Saving, "place", lambda self: self.final)
    killer.around(FileSystemWriter, "finish", "before metadata", "after metadata")
    _know_which(killer, FileSystemWriter, "finish", lambda self: self.path)
    killer.around(saving, "finish_folder", "before manifest")
    killer.around(atomic_dir, "sync_folders", "after manifest")
    killer.around(atomic_dir, "put_in_place", "before the move")
    killer.around(atomic_dir, "_write_synced", after="half of the tracker", only=f"{PARTIAL}{TRACKER}")
    killer.around(saving, "_claim", after="claimed")
    killer.around(saving, "write_whole", "before tracker", "after tracker")
    _watch_removal(killer)
    if killer.order["mutant"]:
        _be_wrong(killer.order["mutant"])


def fail_in_next_step(facts: Facts) -> None:
    """Fail on rank 1 in the step after the save that is struck, once it is struck."""
    from megatron.training import get_args, training

    order = json.loads(os.environ[ORDER])

    @before(training, "train_step")
    def fail(*_args: Any, **_kwargs: Any) -> None:
        if os.environ["RANK"] == "1" and get_args().curr_iteration == order["save"]:
            end_s = time.monotonic() + 60
            while not Path(order["log"]).exists() and time.monotonic() < end_s:
                time.sleep(0.05)
            raise RuntimeError("the disk is on fire")


def _iteration_of(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])


def _count(killer: _Killer, pieces: Any) -> None:
    """Know which save it is in the process of a rank; where another process writes, by counting there."""
    begin, write = saving.Saving.begin, pieces.write_hashed
    written = killer.iteration

    def known_begin(self: Any, *args: Any) -> None:
        killer.iteration = _iteration_of(self.final)
        begin(self, *args)

    def counted_write(*args: Any, **kwargs: Any) -> None:
        nonlocal written
        written += 1
        killer.iteration, killer.pieces = max(killer.iteration, written), 0
        write(*args, **kwargs)

    counted_write.__module__, counted_write.__qualname__ = write.__module__, write.__qualname__
    saving.Saving.begin, pieces.write_hashed = known_begin, counted_write


def _know_which(killer: _Killer, owner: Any, name: str, folder_of: Callable[[Any], Path]) -> None:
    """Go by the folder where a save ends; in the background the next one may have begun by then."""

    @around(owner, name)
    def call(original: Any, self: Any, *args: Any) -> None:
        kept, killer.iteration = killer.iteration, _iteration_of(folder_of(self))
        killer.published = killer.iteration if name == "place" else killer.published
        original(self, *args)
        killer.iteration = kept


def _watch_removal(killer: _Killer) -> None:
    """Tell apart what is removed: a thread removes what is no longer kept."""
    clear, remove = saving.clear, shutil.rmtree
    is_clearing = False

    def watched_clear(*args: Any) -> None:
        nonlocal is_clearing
        is_clearing = True
        clear(*args)
        is_clearing = False

    def watched_remove(path: Any, *args: Any, **kwargs: Any) -> None:
        if "removed_" in str(path):
            is_main = threading.current_thread() is threading.main_thread()
            killer.strike((CLEARING if is_clearing else REPLACED) if is_main else "clean-up")
        remove(path, *args, **kwargs)

    saving.clear, shutil.rmtree = watched_clear, watched_remove


def _watch_pieces(killer: _Killer, pieces: Any) -> None:
    class Stream(InParts):
        def __init__(self, stream: Any, on_part: Any) -> None:
            super().__init__(stream, on_part)
            killer.pieces += 1
            killer.strike({1: "before a shard", 2: "between shards"}.get(killer.pieces, ""))

        def write(self, data: Any) -> int:
            half = len(data) // 2 if killer.is_due("half a shard") and len(data) > 1000 else 0
            if half:
                super().write(memoryview(data)[:half])
                self._stream.flush()
                killer.strike("half a shard")
            return half + super().write(memoryview(data)[half:])

    pieces.InParts = Stream


def _watch_files(killer: _Killer) -> None:
    """Points of the format that has a file for each rank."""

    @around(torch, "save")
    def save(original: Any, state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike) or not re.search(f"{PARTIAL}.*/mp_rank_", str(file)):
            return original(state, file, *args, **kwargs)
        killer.strike("before a shard")
        original(state, file, *args, **kwargs)
        if killer.is_due("half a shard"):
            os.truncate(file, os.path.getsize(file) // 2)
        killer.strike("half a shard")
        killer.strike("between shards")


def _be_wrong(mutant: str) -> None:
    begin, finish = saving.Saving.begin, saving.finish_folder

    def early(self: Any, *args: Any) -> None:
        begin(self, *args)
        (self.final.parent / TRACKER).write_text(atomic_dir.tracker_text(self.final))

    def skip(partial: Path, *args: Any) -> None:
        min(_data(partial)).unlink()
        finish(partial, *args)

    if mutant == "early tracker":
        saving.Saving.begin = early
    else:
        saving.finish_folder = skip


def _data(folder: Path) -> Iterator[Path]:
    yield from (*folder.glob("*.distcp"), *folder.glob("mp_rank_*/*.pt"))


def forget_the_manifest(facts: Facts) -> None:
    """Save as a version of the plugin that knew of none."""
    from vtp_plugin.patches.training import atomic_checkpoint as patch

    def finish(partial: Path, final: Path, manifest: str) -> None:
        atomic_dir.sync_folders(partial)
        atomic_dir.put_in_place(partial, final)

    saving.finish_folder, patch.HAS_MANIFEST = finish, "unknown_then"
