"""What a disk may hold when the power fails, from a log of the system calls of a save.

``strace`` writes the log, so that writes of torch's own code are seen, too. The model promises no more than POSIX does:

* what was written into a file is there once *the same process* has synced it afterwards (another one may be another
  machine, with a cache of its own); before that some of it, none of it, or zeros in its place;
* a name in a folder is made, removed or changed once the folder has been synced afterwards; before that it may or may
  not be, each by itself, in any order. A rename within a folder is one change.

Files are appended to only, so what is in one is a part of what is in it at the end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

CALLS = "open,openat,creat,write,pwrite64,writev,fsync,fdatasync"
NAMES = "rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
STRACE = ["strace", "-f", "-y", "-s", "64", "-e", f"trace={CALLS},{NAMES}"]


@cache
def why_not() -> str:
    """Say why calls cannot be logged here; empty if they can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else f"strace does not work here: {tried.stderr.strip()[:80]}"


@dataclass(frozen=True, slots=True)
class Op:
    """One call that has ended well.

    Attributes:
        kind: create, write, sync, mkdir, rename, exchange or remove.
        pid: of the process.
        path: that it is about.
        other: the new path of a rename.
        count: bytes that were written.
        text: what was written, where it is short.
    """

    kind: str
    pid: int
    path: str
    other: str = ""
    count: int = 0
    text: str = ""


_LINE = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_BEGUN = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_OF_FD = re.compile(r"\d+<([^>]*)>")
_AT = re.compile(r'(?:AT_FDCWD|\d+)(?:<([^>]*)>)?, "((?:[^"\\]|\\.)*)"')


def read_log(lines: Iterable[str], root: Path) -> list[Op]:
    """Read what was done below a folder."""
    begun: dict[str, str] = {}
    ops: list[Op] = []
    for line in lines:
        if match := _BEGUN.match(line):
            begun[match.group(1)] = match.group(3)
            continue
        if match := _ENDED.match(line):
            pid, call, rest = match.groups()
            line = f"{pid} {call}({begun.pop(pid, '')}{rest}"
        match = _LINE.match(line)
        if match is None or int(match.group(4)) < 0:
            continue
        pid, call, words, result = match.groups()
        op = _op(call, int(pid), words, int(result))
        if op is not None and f"{op.path}/".startswith(f"{root}/"):
            ops.append(op)
    return ops


def _op(call: str, pid: int, words: str, result: int) -> Op | None:
    if call in ("write", "pwrite64", "writev", "fsync", "fdatasync"):
        match = _OF_FD.match(words)
        if match is None:
            return None
        if "sync" in call:
            return Op("sync", pid, match.group(1))
        text = _QUOTED.search(words)
        return Op("write", pid, match.group(1), count=result, text=text.group(1) if text and call == "write" else "")
    if call.endswith("at") or call == "renameat2":
        paths = [os.path.join(folder or os.getcwd(), name) for folder, name in _AT.findall(words)]
    else:
        paths = [os.path.abspath(name) for name in _QUOTED.findall(words)]
    if not paths:
        return None
    if call.startswith("open") or call == "creat":
        return Op("create", pid, paths[0]) if "O_CREAT" in words or call == "creat" else None
    if call.startswith("mkdir"):
        return Op("mkdir", pid, paths[0])
    if call.startswith("rename"):
        return Op("exchange" if "RENAME_EXCHANGE" in words else "rename", pid, paths[0], paths[1])
    return Op("remove", pid, paths[0])


@dataclass(slots=True)
class _Node:
    """A file or a folder.

    Attributes:
        is_folder: what it is.
        writes: number of the op, process and bytes of each write.
        syncs: number of the op and process of each sync.
        text: all that was written, where it was short.
    """

    is_folder: bool
    writes: list[tuple[int, int, int]] = field(default_factory=list)
    syncs: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""

    def length(self, end: int) -> int:
        return sum(count for number, _, count in self.writes if number < end)

    def synced_length(self, end: int) -> int:
        """Return how much of it must be there at some point."""
        safe = 0
        for number, pid, count in self.writes:
            if not any(number < sync < end and pid == of for sync, of in self.syncs):
                break
            safe += count
        return safe


@dataclass(frozen=True, slots=True)
class _Change:
    """Names of folders that change at once.

    Attributes:
        number: of the op.
        entries: folder, name, and what it names then; None for nothing.
    """

    number: int
    entries: tuple[tuple[int, str, int | None], ...]


class Disk:
    """All that was done below a folder.

    Args:
        ops: in the order in which they ended.
        root: the folder, which was empty.
    """

    def __init__(self, ops: Sequence[Op], root: Path) -> None:
        self.ops, self.root = ops, root
        self.nodes = [_Node(is_folder=True)]
        self._changes: list[_Change] = []
        self._now: dict[int, dict[str, int]] = {0: {}}
        for number, op in enumerate(ops):
            self._do(number, op)

    def _do(self, number: int, op: Op) -> None:
        node = self._find(op.path)
        if op.kind in ("create", "mkdir"):
            if node is None:
                self.nodes.append(_Node(is_folder=op.kind == "mkdir"))
                node = len(self.nodes) - 1
                self._now[node] = {}
                self._change(number, (op.path, node))
        elif op.kind in ("rename", "exchange"):
            gone = self._find(op.other) if op.kind == "exchange" else None
            self._change(number, (op.path, gone), (op.other, node))
        elif op.kind == "remove":
            self._change(number, (op.path, None))
        elif node is not None and op.kind == "write":
            self.nodes[node].writes.append((number, op.pid, op.count))
            self.nodes[node].text += op.text
        elif node is not None and op.kind == "sync":
            self.nodes[node].syncs.append((number, op.pid))

    def _find(self, path: str) -> int | None:
        node: int | None = 0
        for name in Path(path).relative_to(self.root).parts:
            node = None if node is None else self._now[node].get(name)
        return node

    def _change(self, number: int, *places: tuple[str, int | None]) -> None:
        entries: list[tuple[int, str, int | None]] = []
        for path, node in places:
            folder = self._find(os.path.dirname(path))
            if folder is None:
                return
            entries.append((folder, os.path.basename(path), node))
        change = _Change(number, tuple(entries))
        self._changes.append(change)
        _apply(self._now, change)

    def without(self, sync: int) -> Disk:
        """Return the same without one sync."""
        return Disk([*self.ops[:sync], Op("none", 0, str(self.root)), *self.ops[sync + 1 :]], self.root)

    def unsynced(self) -> set[str]:
        """Return the files that are there at the end and have a write that was not synced."""
        return {
            path
            for path, node in self._paths(self._now)
            if not self.nodes[node].is_folder
            and self.nodes[node].synced_length(len(self.ops)) < self.nodes[node].length(len(self.ops))
        }

    def states(self, end: int) -> Iterator[dict[int, dict[str, int]]]:
        """Yield what the folders may hold after some ops: what is safe, with none, one, all but one, or all others."""
        done = [change for change in self._changes if change.number < end]
        loose = [change for change in done if not self._is_safe(change, end)]
        all_but_one = ([other for other in loose if other is not each] for each in loose)
        choices = [loose, *([each] for each in loose), *all_but_one]
        seen: list[list[_Change]] = []
        for chosen in ([], *choices):
            kept = [change for change in done if change not in loose or change in chosen]
            if kept not in seen:
                seen.append(kept)
                folders: dict[int, dict[str, int]] = {number: {} for number in self._now}
                for change in kept:
                    _apply(folders, change)
                yield folders

    def after(self, end: int) -> dict[int, dict[str, int]]:
        """Return what the folders hold after some ops where the power stays."""
        folders: dict[int, dict[str, int]] = {number: {} for number in self._now}
        for change in self._changes:
            if change.number < end:
                _apply(folders, change)
        return folders

    def _is_safe(self, change: _Change, end: int) -> bool:
        folders = {folder for folder, _, _ in change.entries}
        return all(any(change.number < sync < end for sync, _ in self.nodes[folder].syncs) for folder in folders)

    def _paths(self, folders: dict[int, dict[str, int]], at: int = 0, path: str = "") -> Iterator[tuple[str, int]]:
        for name, node in sorted(folders[at].items()):
            yield f"{path}{name}", node
            yield from self._paths(folders, node, f"{path}{name}/")

    def files(self, folders: dict[int, dict[str, int]], end: int) -> dict[str, tuple[int, int, int]]:
        """Return of every file that may be there what it is, the bytes that are safe, and those that were written."""
        return {
            path: (node, self.nodes[node].synced_length(end), self.nodes[node].length(end))
            for path, node in self._paths(folders)
            if not self.nodes[node].is_folder
        }

    def final(self) -> dict[int, str]:
        """Return the path of every file that is there at the end."""
        return {node: path for path, node in self._paths(self._now) if not self.nodes[node].is_folder}

    def build(self, folders: dict[int, dict[str, int]], end: int, target: Path, *, has_zeros: bool) -> None:
        """Make a folder that holds what the disk may hold.

        Args:
            folders: one of the states.
            end: of the ops.
            target: the folder; it must not be there.
            has_zeros: fill what is not safe with zeros, not leave it out.
        """
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        final = self.final()
        for path, node in self._paths(folders):
            if self.nodes[node].is_folder:
                (target / path).mkdir()
                continue
            safe, written = self.nodes[node].synced_length(end), self.nodes[node].length(end)
            if node in final:
                data = (self.root / final[node]).read_bytes()[:safe]
            else:
                data = self.nodes[node].text.encode()[:safe]
            (target / path).write_bytes(data + bytes(written - safe if has_zeros else 0))


def _apply(folders: dict[int, dict[str, int]], change: _Change) -> None:
    for folder, name, node in change.entries:
        if node is None:
            folders[folder].pop(name, None)
        else:
            folders[folder][name] = node


def problems_of(disk: Disk, inner: str) -> list[str]:
    """Say what a disk may have lost or torn of checkpoints.

    Args:
        disk: on which, beside the folder of checkpoints, a folder ``saved_2`` was made as soon as the iteration 2 was
            called saved.
        inner: the folder of checkpoints, below the root; it and those above it were made meanwhile, too.
    """
    folder = disk.root / inner
    made = [number for number, op in enumerate(disk.ops) if op.kind == "mkdir" and "/saved_" in op.path]
    problems = [
        f"{inner} may be lost after it was saved"
        for end in range(min(made, default=len(disk.ops)), len(disk.ops) + 1)
        for state in disk.states(end)
        if not any(path.startswith(f"{inner}/") for path in disk.files(state, end))
    ]
    numbers = [number for number, op in enumerate(disk.ops) if f"{op.path}/".startswith(f"{folder}/")]
    numbers = numbers[1:]  # it is made
    ends: dict[int, str] = {}
    for number in made:
        before = [place for place, of_all in enumerate(numbers) if of_all < number]
        ends[before[-1]] = disk.ops[number].path.rpartition("_")[2]
    return [*problems, *torn_states(Disk([disk.ops[number] for number in numbers], folder), ends)]


def torn_states(disk: Disk, published: dict[int, str]) -> Iterator[str]:
    """Yield where a disk may hold a checkpoint that is not whole, or have lost one that was saved.

    A checkpoint is looked at by lengths that are safe: with its whole length safe, a file is as it was written.

    Args:
        disk: with the folder of checkpoints as its root.
        published: the iteration that each op, which is the last of a save, has made safe.
    """
    final = disk.final()
    whole = {
        folder: {path for path in final.values() if path.startswith(f"{folder}/")}
        for folder in {path.split("/")[0] for path in final.values() if path.startswith("iter_")}
    }
    lengths = {path: disk.nodes[node].length(len(disk.ops)) for node, path in final.items()}
    for end in range(1, len(disk.ops) + 1):
        due = [iteration for number, iteration in published.items() if number < end]
        for folders in disk.states(end):
            files = disk.files(folders, end)
            tracker = files.get("latest_checkpointed_iteration.txt")
            text = None if tracker is None else disk.nodes[tracker[0]].text[: tracker[1]]
            if due and (text is None or not text or int(text) < int(due[-1])):
                yield f"after op {end}: the tracker says {text!r}, and {due[-1]} was saved"
            named = None if text is None else f"iter_{int(text or -1):07d}"
            if named is not None and not any(path.startswith(f"{named}/") for path in files):
                yield f"after op {end}: the tracker says {text!r}, which is not there"
            for folder in {path.split("/")[0] for path in files if path.startswith("iter_")} | {
                name for name in folders[0] if name.startswith("iter_")
            }:
                here = {path for path in files if path.startswith(f"{folder}/")}
                bad = {path for path in here if path in lengths and files[path][1] < lengths[path]}
                if whole.get(folder, here) - here or bad:
                    yield f"after op {end}: {folder} lacks {sorted(whole.get(folder, here) - here) or sorted(bad)}"
