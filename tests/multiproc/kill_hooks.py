"""Kill a rank, or the process that saves for it, at a named point of a save; and controls: saves that are wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

from vtp_plugin.checkpoint import saving, whole
from vtp_plugin.checkpoint.files import TRACKER
from vtp_plugin.checkpoint.whole import PARTIAL

ORDER = "VTP_TEST_KILL"
"""The variable with what is to happen, as JSON: ``point``, ``save`` (which one, from 1 on), ``rank``, ``log``, and
``act``: a command to run there in the place of a kill."""
SHARED = (
    "before manifest", "after manifest", "before the move", "before tracker", "half of the tracker", "after tracker",
    "clean-up",
)  # fmt: skip
"""Points of the rank that publishes."""
OF_PIECES = ("before a shard", "half a shard", "between shards")
OF_INDEX = ("before metadata", "after metadata")
"""Points of ``torch_dist`` on rank 0."""
MUTANTS = ("early tracker", "skipped shard")


class _Killer:
    def __init__(self) -> None:
        self.order = json.loads(os.environ[ORDER])
        self.count = 0  # of saves in this process

    def is_due(self, point: str) -> bool:
        """Tell whether it is to happen here and now."""
        order, rank = self.order, int(os.environ["RANK"])
        return order["point"] == point and order["save"] == self.count and order["rank"] in (rank, None)

    def strike(self, point: str) -> None:
        """End this process if its time has come; the log outlives it."""
        order, rank = self.order, int(os.environ["RANK"])
        if self.is_due(point):
            try:
                with Path(order["log"]).open("x") as log:
                    log.write(f"{point}, save {self.count}, rank {rank}, process {os.getpid()}\n")
            except FileExistsError:  # another process of the rank was first: Megatron 0.12 writes with two
                return
            if act := order.get("act"):
                subprocess.run(act, shell=True, check=True)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, before: str = "", after: str = "", only: str = "") -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            is_meant = only in str(args[0]) if only else True
            if is_meant and before:
                self.strike(before)
            result = original(*args, **kwargs)
            if is_meant and after:
                self.strike(after)
            return result

        setattr(owner, name, call)


def kill_in_save(facts: dict[str, Any]) -> None:
    """Do what the order says."""
    from vtp_plugin.patches.core.dist_checkpointing.strategies import filesystem_async as pieces

    killer = _Killer()
    _count(killer, pieces)
    _watch_pieces(killer, pieces)
    _watch_files(killer)
    _know_which(killer, saving.Saving, "publish", lambda self: self.final)
    killer.around(FileSystemWriter, "finish", "before metadata", "after metadata")
    _know_which(killer, FileSystemWriter, "finish", lambda self: self.path)
    killer.around(saving, "finish_folder", "before manifest")
    killer.around(whole, "sync_folders", "after manifest")
    killer.around(whole, "put_in_place", "before the move")
    killer.around(whole, "_write_synced", after="half of the tracker", only=f"{PARTIAL}{TRACKER}")
    killer.around(saving, "write_whole", "before tracker", "after tracker")
    killer.around(shutil, "rmtree", "clean-up", only="removed_")
    if killer.order["point"] in MUTANTS:
        _be_wrong(killer.order["point"])


def _count(killer: _Killer, pieces: Any) -> None:
    """Count saves in the process of a rank; where another process writes, there."""
    begin, write = saving.Saving.begin, pieces.write_hashed
    counts = {"begin": 0, "write": 0}

    def noted(name: str) -> None:
        counts[name] += 1
        killer.count = max(counts.values())

    def counted_begin(*args: Any) -> None:
        noted("begin")
        begin(*args)

    def counted_write(*args: Any, **kwargs: Any) -> None:
        noted("write")
        killer.pieces = 0  # pyright: ignore[reportAttributeAccessIssue]
        write(*args, **kwargs)

    counted_write.__module__, counted_write.__qualname__ = write.__module__, write.__qualname__
    saving.Saving.begin, pieces.write_hashed = counted_begin, counted_write


def _know_which(killer: _Killer, owner: Any, name: str, folder_of: Callable[[Any], Path]) -> None:
    """Count by the iteration where a save ends; in the background the next one may have begun by then."""
    original = getattr(owner, name)

    def call(self: Any, *args: Any) -> None:
        before, killer.count = killer.count, int(folder_of(self).name.rpartition("_")[2])
        original(self, *args)
        killer.count = before

    setattr(owner, name, call)


def _watch_pieces(killer: _Killer, pieces: Any) -> None:
    class Stream(pieces._HashedStream):
        number = 0

        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            killer.pieces += 1  # pyright: ignore[reportAttributeAccessIssue]
            killer.strike({1: "before a shard", 2: "between shards"}.get(killer.pieces, ""))  # pyright: ignore

        def write(self, data: Any) -> int:
            if killer.is_due("half a shard") and len(data) > 1000:
                self._stream.write(memoryview(data)[: len(data) // 2])
                self._stream.flush()
                killer.strike("half a shard")
            return super().write(data)

    pieces._HashedStream = Stream


def _watch_files(killer: _Killer) -> None:
    """Points of the format that has a file for each rank."""
    original = torch.save

    def save(state: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(file, str | os.PathLike) or PARTIAL not in str(file):
            return original(state, file, *args, **kwargs)
        killer.strike("before a shard")
        original(state, file, *args, **kwargs)
        if killer.is_due("half a shard"):
            os.truncate(file, os.path.getsize(file) // 2)
        killer.strike("half a shard")
        killer.strike("between shards")

    torch.save = save


def _be_wrong(mutant: str) -> None:
    begin, finish = saving.Saving.begin, saving.finish_folder

    def early(self: Any, *args: Any) -> None:
        begin(self, *args)
        (self.final.parent / TRACKER).write_text(whole.tracker_text(self.final))

    def skip(partial: Path, *args: Any) -> None:
        min(_data(partial)).unlink()
        finish(partial, *args)

    if mutant == "early tracker":
        saving.Saving.begin = early
    else:
        saving.finish_folder = skip


def _data(folder: Path) -> Iterator[Path]:
    yield from (*folder.glob("*.distcp"), *folder.glob("mp_rank_*/*.pt"))


def _forget_the_manifest(facts: dict[str, Any]) -> None:
    """Save as a version of the plugin that knew of none."""
    from vtp_plugin.patches.training import saving as patch

    def finish(partial: Path, final: Path, manifest: str) -> None:
        whole.sync_folders(partial)
        whole.put_in_place(partial, final)

    saving.finish_folder, patch.HAS_MANIFEST = finish, "unknown_then"


KILL_HOOKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "kill_in_save": kill_in_save,
    "forget_the_manifest": _forget_the_manifest,
}
