"""The power may fail at any point of a save: what is on the disk then is whole, and each sync is needed for that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.power_loss import STRACE, Disk, problems_of, read_log, why_not
from vtp_plugin.checkpoint.save.atomic_dir import problem_of

INNER = "made/here"
SAVES = """
import os, sys
from pathlib import Path
from vtp_plugin.checkpoint.save.saving import Kept, Saving, Savings
from vtp_plugin.checkpoint.save.atomic_dir import whole_folder

root, how = Path(sys.argv[1]), sys.argv[2]
folder, savings = root / sys.argv[3], Savings()


def write(file, text):
    file.parent.mkdir(exist_ok=True)
    with file.open("w") as opened:
        opened.write(text * 3000)


for iteration in (2, 4):
    final = folder / f"iter_{iteration:07d}"
    if how == "tool":
        with whole_folder(final) as partial:
            write(partial / "a", "a")
            write(partial / "inner" / "b", "b")
    else:
        saving = savings.begin(Saving(final, is_by_rank=how == "torch"))
        saving.partial.mkdir()
        if how == "torch":
            saving.own = saving.partial / "mp_rank_00"
            write(saving.own / "model_optim_rng.pt", "m")
            write(saving.own / "distrib_optim.pt", "d")
        else:
            for name in (".metadata", "metadata.json"):
                write(saving.partial / name, name)
        saving.sync_own(is_first=True)
        if how == "torch":
            assert saving.claim()
        saving.publish(Kept())
        savings.end(saving)
    os.mkdir(root / f"saved_{iteration}")
"""


def _logged(folder: Path, how: str) -> Disk:
    root = folder / "root"
    root.mkdir()
    code = [sys.executable, "-c", SAVES, str(root), how, INNER]
    subprocess.run([*STRACE, "-o", str(folder / "log"), *code], check=True, timeout=120)
    return Disk(read_log((folder / "log").read_text().splitlines(), root), root)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("how", ["tool", "torch", "torch_dist"])
def test_each_sync_is_needed(tmp_path: Path, how: str) -> None:
    disk = _logged(tmp_path, how)
    assert {op.kind for op in disk.ops} >= {"create", "write", "sync", "mkdir", "rename"}
    assert problems_of(disk, INNER) == [] and disk.unsynced() == set()
    syncs = [number for number, op in enumerate(disk.ops) if op.kind == "sync"]
    assert len(syncs) >= 12
    needless = [disk.ops[number] for number in syncs if not problems_of(disk.without(number), INNER)]
    assert not needless, needless


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_what_a_disk_may_hold_is_told_whole_from_broken(tmp_path: Path) -> None:
    """States are built as folders: those that the tools call whole are whole, and there are broken ones."""
    disk = _logged(tmp_path, "tool")
    seen = set()
    for end in range(1, len(disk.ops), 3):
        for state in disk.states(end):
            disk.build(state, end, tmp_path / "built", has_zeros=end % 2 == 0)
            for folder in (tmp_path / "built" / INNER).glob("*iter_*"):
                problem = problem_of(folder)
                is_partial = folder.name.startswith("partial_")
                # Without metadata it is no checkpoint; what has a manifest that holds is as it was written.
                seen.add((is_partial, problem is None or ".metadata" in problem or "metadata.json" in problem))
                assert is_partial or ".metadata" in str(problem) or "metadata.json" in str(problem), problem
    assert (False, True) in seen and (True, False) in seen
