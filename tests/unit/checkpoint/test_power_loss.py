"""The power may fail at any point of a save: what is on the disk then is whole, and each sync is needed for that."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
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
        saving.place()
        saving.note(Kept())
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


TWO_SITES = """
import os, sys
from pathlib import Path
from vtp_plugin.checkpoint.format.site_part import SitePart, digest_of_save
from vtp_plugin.checkpoint.save.saving import Kept, Saving, Savings

root, is_early = Path(sys.argv[1]), sys.argv[2] == "early"
sites = {site: Savings() for site in ("edge", "cloud")}
for iteration in (2, 4, 6):
    saves = []
    for site, savings in sites.items():
        part = SitePart(site=site, sites=tuple(sites), save=digest_of_save("run", str(iteration)))
        saving = savings.begin(Saving(root / site / f"iter_{iteration:07d}", is_by_rank=False, part=part))
        saving.partial.mkdir()
        for name in (".metadata", "metadata.json"):
            (saving.partial / name).write_text(name * 3000)
        saving.sync_own(is_first=True)
        saves.append(saving)
    for saving in saves:
        saving.place()
        if is_early:  # a site that does not wait for the other
            saving.note(Kept(count=1))
    os.mkdir(root / f"saved_{iteration}")
    for saving, savings in zip(saves, sites.values(), strict=True):
        if not is_early:
            saving.note(Kept(count=1))
        savings.end(saving)
"""
OF_A_PART = {".metadata", "metadata.json", "vtp_part.json", "vtp_manifest.json"}


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("how", ["confirmed", "early"])
def test_one_site_loses_power(tmp_path: Path, how: str) -> None:
    """At any point of a save both sites have a save whole, the newest that was confirmed or a newer one.

    The control removes what is older before the other site has the newer one, and is found.
    """
    root = tmp_path / "root"
    root.mkdir()
    code = [sys.executable, "-c", TWO_SITES, str(root), how]
    subprocess.run([*STRACE, "-o", str(tmp_path / "log"), *code], check=True, timeout=120)
    disk = Disk(read_log((tmp_path / "log").read_text().splitlines(), root), root)
    lost = [*_without_common(disk)]
    assert bool(lost) is (how == "early"), lost[:3]


def _without_common(disk: Disk) -> Iterator[str]:
    confirmed = {number: int(op.path.rpartition("_")[2]) for number, op in enumerate(disk.ops) if "/saved_" in op.path}
    first = min(confirmed)
    for end in range(first + 1, len(disk.ops) + 1):
        newest = max(iteration for number, iteration in confirmed.items() if number < end)
        # A site that keeps its power has all that was done.
        alive = _whole_parts(disk, disk.after(end), end, is_safe=False)
        for state in disk.states(end):
            dead = _whole_parts(disk, state, end, is_safe=True)
            for lost, kept in (("edge", "cloud"), ("cloud", "edge")):
                if max(dead[lost] & alive[kept], default=0) < newest:
                    yield f"after op {end}: {lost} has {dead[lost]}, {kept} {alive[kept]}, and {newest} was confirmed"


def _whole_parts(disk: Disk, state: dict[int, dict[str, int]], end: int, *, is_safe: bool) -> dict[str, set[int]]:
    """Give the iterations of which each site has all bytes."""
    files: dict[str, set[str]] = {}
    for path, (node, safe, _) in disk.files(state, end).items():
        if not is_safe or safe == disk.nodes[node].length(len(disk.ops)):
            folder, _, name = path.rpartition("/")
            files.setdefault(folder, set()).add(name)
    whole: dict[str, set[int]] = {"edge": set(), "cloud": set()}
    for folder, names in files.items():
        site, _, checkpoint = folder.partition("/")
        if checkpoint.startswith("iter_") and names == OF_A_PART:
            whole[site].add(int(checkpoint[5:]))
    return whole
