"""Which checkpoint a run loads: what the plugin foretells, and Megatron's own ``load_checkpoint``, in one process.

Only the last function, which would read the checkpoint, is replaced by one that says which it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.checkpoint.test_checkpoint_files import make
from vtp_plugin.checkpoint.format.checkpoint_files import check_files, check_trackers
from vtp_plugin.checkpoint.format.resolver import TRACKER, Asked, asked_at_start, overruled
from vtp_plugin.checkpoint.save.saving import Savings
from vtp_plugin.errors import ConfigError
from vtp_plugin.session.loading import Loading

pytestmark = pytest.mark.needs("scripts_here")

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}


class Loaded(Exception):
    """Megatron loads a checkpoint."""


def arguments(**given: Any) -> Namespace:
    """Return Megatron's arguments, as far as they say which checkpoint is loaded."""
    usual: dict[str, Any] = {
        **dict.fromkeys(("load", "pretrained_checkpoint", "ckpt_step", "non_persistent_global_ckpt_dir")),
        **dict.fromkeys(("auto_detect_ckpt_format", "use_dist_ckpt", "exit_on_missing_checkpoint", "finetune"), False),
        **dict.fromkeys(("use_distributed_optimizer", "no_load_optim", "use_megatron_fsdp"), False),
        "non_persistent_ckpt_type": None,
        "ckpt_format": "torch_dist",
        "rank": 0,
        "world_size": 1,
    }
    return Namespace(**usual | given)


class Megatron:
    """Megatron's own answer, without the plugin or with what it puts in the place of trackers.

    Args:
        monkeypatch: of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.training import checkpointing, global_vars

        from vtp_plugin.patches.training import atomic_checkpoint

        self.checkpointing: Any = checkpointing
        self.args = arguments()
        self.session: Any = SimpleNamespace(
            savings=Savings(),
            loading=Loading(),
            config=SimpleNamespace(load_newest_valid=False),
            ranks=SimpleNamespace(store=None),
        )
        session, args = self.session, lambda: self.args
        exists = functools.partial(atomic_checkpoint._exists, session, checkpointing.checkpoint_exists)
        for module, name, value in (
            (checkpointing, "get_args", args),
            (global_vars, "get_args", args),
            (checkpointing, "_load_global_dist_base_checkpoint", self._load),
            (
                checkpointing,
                "get_checkpoint_tracker_filename",
                functools.partial(atomic_checkpoint._tracker, session, checkpointing.get_checkpoint_tracker_filename),
            ),
            (checkpointing, "checkpoint_exists", exists),
        ):
            monkeypatch.setattr(module, name, value)

    def _load(self, folder: str, args: Any, rank0: bool, state: Any, iteration: int, release: bool, **_: Any) -> None:
        raise Loaded(self.checkpointing.get_checkpoint_name(folder, iteration, release, return_base_dir=True))

    def __call__(self, args: Namespace) -> Path | None:
        """Return the checkpoint that Megatron loads; None if it begins without one."""
        self.args = Namespace(**vars(args))
        try:
            found = self.checkpointing.load_checkpoint([], None, None)
        except Loaded as loaded:
            return Path(str(loaded))
        except FileNotFoundError as error:  # an iteration that is not there, but it was decided for
            if error.filename is None:  # neither folder has a checkpoint
                return None
            return Path(error.filename)
        assert found == (0, 0)
        return None


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Megatron:
    return Megatron(monkeypatch)


def put(folder: Path, *iterations: int) -> None:
    """Write tiny checkpoints, which Megatron takes for distributed ones; the tracker names the last."""
    folder.mkdir(parents=True, exist_ok=True)
    make(folder, *iterations, note=str(iterations[-1]) if iterations else None)
    for number in iterations:
        (folder / f"iter_{number:07d}" / "metadata.json").write_text(json.dumps(CONFIG))


def name(folder: Path, text: str | None) -> None:
    """Write a tracker, or remove it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TRACKER).unlink(missing_ok=True)
    if text is not None:
        (folder / TRACKER).write_text(text)


STEPS = (None, 0, 1, 2, 3, 4, 7, -1, -5)


@pytest.mark.parametrize("has_other", [False, True])
@pytest.mark.parametrize("has_pretrained", [False, True])
def test_as_megatron_decides(megatron: Megatron, tmp_path: Path, has_other: bool, has_pretrained: bool) -> None:
    """Every pair of trackers, with each step; a line says where the step is not what is loaded."""
    load, pretrained, other = tmp_path / "load", tmp_path / "pretrained", tmp_path / "other"
    name(pretrained, "3")
    given = {"pretrained_checkpoint": str(pretrained)} if has_pretrained else {}
    if has_other:
        given["non_persistent_global_ckpt_dir"] = str(other)
        name(load / "non_persistent", "9")
    for own, newest in itertools.product((None, "2", "4", "release"), (None, "1", "2", "3", "4", "5")):
        name(load, own)
        name(other if has_other else load / "non_persistent", newest)
        for kind, step, is_given in itertools.product((None, "global"), STEPS, {True, not has_pretrained}):
            args = arguments(
                load=str(load) if is_given else None, ckpt_step=step, non_persistent_ckpt_type=kind, **given
            )
            asked, wanted = asked_at_start(args), megatron(args)
            found = asked.resolve()
            assert (None if found is None else found.checkpoint) == wanted, (own, newest, kind, step, is_given)
            is_obeyed = step is None or (wanted is not None and wanted.name == f"iter_{step:07d}")
            lines = [*overruled(asked)]
            assert bool(lines) is not is_obeyed, (own, newest, kind, step, lines)
            assert all(line.count(";") == 2 and str(wanted or "nothing") in line for line in lines), lines


def done(line: str, args: Namespace, megatron: Megatron) -> Path | None:
    """Do what a line says, return what Megatron loads then, and undo it."""
    way, then = line.rpartition("; ")[2], Namespace(**vars(args))
    undo: list[Any] = []
    if match := re.search(r"write (\d+) into ([^ ,]+)", way):
        file = Path(match[2] if match[2] != "it" else line.partition(" ")[0])
        before = file.read_text() if file.exists() else None
        undo.append(functools.partial(name, file.parent, before))
        file.write_text(match[1])
    if match := re.search(r"move ([^ ,]+) away", way):
        Path(match[1]).rename(f"{match[1]}.away")
        undo.append(functools.partial(Path(f"{match[1]}.away").rename, match[1]))
    if match := re.search(r"with --ckpt-step (\d+)", way):
        then.ckpt_step = int(match[1])
    if match := re.search(r"give --load ([^ ,]+)", way):
        then.load = match[1]
    if "leave --ckpt-step out" in way or "without --ckpt-step" in way:
        then.ckpt_step = None
    try:
        if "--vtp-load-newest-valid" in way:
            return chosen(then, megatron)
        assert vars(then) != vars(args) or undo, line
        return megatron(then)
    finally:
        for act in undo:
            act()


def chosen(args: Namespace, megatron: Megatron) -> Path | None:
    """Return what Megatron loads with ``--vtp-load-newest-valid``."""
    from vtp_plugin.patches.training.choose_checkpoint import choose

    megatron.session.config.load_newest_valid, megatron.args = True, args
    try:
        load_dir = args.load if megatron.checkpointing.checkpoint_exists(args.load) else asked_at_start(args).load_dir
        found = choose(megatron.session, Asked(**vars_of(asked_at_start(args)) | {"load_dir": load_dir}), args)
        loaded = megatron(args)
        assert loaded == (None if found is None else found.checkpoint)
        return loaded
    finally:
        megatron.session.config.load_newest_valid = False
        megatron.session.savings.trackers.clear()


def vars_of(asked: Asked) -> dict[str, Any]:
    """Return the fields of a frozen object."""
    return {field: getattr(asked, field) for field in asked.__dataclass_fields__}


FOLDERS: list[tuple[tuple[int, ...], tuple[int, ...], str]] = [
    ((2, 4), (3, 5), "load"),
    ((2, 4), (1, 3), "load"),
    ((2,), (2,), "load"),
    ((2, 4), (), "load"),
    ((), (1, 3), "load"),
    ((2,), (3,), "other"),
    ((), (3,), "pretrained"),
    ((), (), "pretrained"),
]


@pytest.mark.parametrize(("persistent", "others", "where"), FOLDERS, ids=str)
def test_what_is_damaged_and_each_way_out(
    megatron: Megatron, tmp_path: Path, persistent: tuple[int, ...], others: tuple[int, ...], where: str
) -> None:
    """With the flag the newest intact one of both folders; without it each line leads where it says."""
    load, pretrained = tmp_path / "load", tmp_path / "pretrained"
    newest = tmp_path / "other" if where == "other" else load / "non_persistent"
    put(load, *persistent)
    put(newest, *others)
    args = arguments(load=str(load), non_persistent_ckpt_type="global")
    if where == "other":
        args.non_persistent_global_ckpt_dir = str(newest)
    if where == "pretrained":
        put(pretrained, 1, 6)
        args.pretrained_checkpoint = str(pretrained)
    there = [place for folder in (load, newest, pretrained) for place in sorted(folder.glob("iter_*"))]
    for damaged in itertools.chain.from_iterable(itertools.combinations(there, n) for n in range(len(there) + 1)):
        for place in damaged:
            (place / "common.pt").rename(place / "common.away")
        intact = [place for place in there if place not in damaged]
        _assert_newest_intact(megatron, args, intact, newest)
        for step in (None, 0, 1, 2, 3, 4, 5):
            args.ckpt_step = step
            _assert_ways_out(megatron, args, there, intact, step)
        args.ckpt_step = None
        for place in damaged:
            (place / "common.away").rename(place / "common.pt")


def _assert_newest_intact(megatron: Megatron, args: Namespace, intact: list[Path], newest: Path) -> None:
    own = [place for place in intact if place.parent.name != "pretrained"]
    is_own = any(Path(args.load).glob("iter_*")) or any(newest.glob("iter_*"))
    best = max(own if is_own else intact, key=lambda place: (int(place.name[5:]), place.parent == newest), default=None)
    try:
        assert chosen(args, megatron) == best
    except ConfigError as error:
        assert best is None and "holds no intact checkpoint" in str(error)


def _assert_ways_out(
    megatron: Megatron, args: Namespace, there: list[Path], intact: list[Path], step: int | None
) -> None:
    asked, loads = asked_at_start(args), megatron(args)
    assert [*check_trackers(asked)] == []
    for line in overruled(asked):
        assert loads is None or loads.name != f"iter_{step:07d}"
        then = done(line, args, megatron)
        wanted = [place for place in there if place.name == f"iter_{step:07d}"]
        if any(place.parent == asked.folder for place in wanted) or "leave --ckpt-step out" not in line[-25:]:
            assert then in wanted, (line, then)
    lines = check_files(asked)
    assert bool(lines) is (loads is not None and loads not in intact), (loads, lines)
    for line in lines:
        if line.endswith("copy it again, or load another folder"):
            reachable = [place for place in intact if place.parent.name != "pretrained" or asked.passed_over]
            assert not reachable, (line, reachable)
        else:
            then = done(line, args, megatron)
            assert then in intact, (line, then)


def _trackers(*texts: str | None) -> dict[str, dict[str, float]]:
    """Return what another rank posts about the trackers that it sees."""
    return {str(place): {} if text is None else {text: 0.0} for place, text in enumerate(texts)}


def test_ranks_with_folders_of_their_own_load_the_newest_of_all(megatron: Megatron, tmp_path: Path) -> None:
    """As Megatron's ``read_metadata``: a run may have been killed before all sites wrote their trackers."""
    from vtp_plugin.patches.training.choose_checkpoint import settle_trackers

    load, newest = tmp_path / "load", tmp_path / "load" / "non_persistent"
    put(load, 2, 4)
    name(load, "2")
    put(newest, 1)
    args = arguments(load=str(load), non_persistent_ckpt_type="global")
    for others, wanted in (
        (_trackers("2", "1"), load / "iter_0000002"),
        (_trackers("4", "3"), load / "iter_0000004"),
        (_trackers("2", "3"), newest / "iter_0000003"),
        (_trackers(None, None), load / "iter_0000002"),
        (_trackers("9" * 40, "../x"), load / "iter_0000002"),  # of a rank that means harm
    ):
        megatron.session.savings.trackers.clear()
        megatron.session.is_planned = False
        megatron.session.ranks = SimpleNamespace(
            store=object(), share_reports=lambda own, join, others=others: join([own, others])
        )
        asked = Asked(load_dir=str(load), kind="global", trackers=megatron.session.savings.trackers)
        settle_trackers(megatron.session, asked, args)
        assert asked.checkpoint == megatron(args) == wanted


@pytest.mark.parametrize("spelled", ["{}", "{}/", "{}/../load/", "{}/./"])
def test_a_folder_may_be_spelled_in_other_ways(megatron: Megatron, tmp_path: Path, spelled: str) -> None:
    put(tmp_path / "load", 2, 4)
    (tmp_path / "load" / "iter_0000004" / "common.pt").unlink()
    args = arguments(load=spelled.format(tmp_path / "load"))
    found = chosen(args, megatron)
    assert found is not None and found.samefile(tmp_path / "load" / "iter_0000002")


def test_a_release_overrules_a_step_and_is_passed_over(megatron: Megatron, tmp_path: Path) -> None:
    put(tmp_path, 2, 4)
    (tmp_path / "iter_0000004").rename(tmp_path / "release")
    name(tmp_path, "release")
    args = arguments(load=str(tmp_path), ckpt_step=2)
    (line,) = overruled(asked_at_start(args))
    assert done(line, args, megatron) == tmp_path / "iter_0000002"
    args.ckpt_step = None
    assert chosen(args, megatron) == tmp_path / "release"
    (tmp_path / "release" / "common.pt").unlink()
    (line,) = check_files(asked_at_start(args))
    assert line.endswith("with --vtp-load-newest-valid") and done(line, args, megatron) == tmp_path / "iter_0000002"


def test_a_step_of_the_folder_without_a_tracker_is_not_looked_for_in_the_other(
    megatron: Megatron, tmp_path: Path
) -> None:
    load, pretrained = tmp_path / "load", tmp_path / "pretrained"
    put(load, 2)
    put(pretrained, 2, 4)
    name(load, None)
    args = arguments(load=str(load), pretrained_checkpoint=str(pretrained), ckpt_step=2)
    (line,) = overruled(asked_at_start(args))
    assert line.endswith(f"write 2 into {load / TRACKER}") and done(line, args, megatron) == load / "iter_0000002"
    args.ckpt_step = 4
    assert [*overruled(asked_at_start(args))] == [] and megatron(args) == pretrained / "iter_0000004"
    args.ckpt_step = None
    (line,) = check_trackers(asked_at_start(args))
    assert "is missing; it must hold" in line and done(line, args, megatron) == load / "iter_0000002"
    assert chosen(args, megatron) == load / "iter_0000002"


def test_a_lost_tracker_of_those_that_are_not_persistent(megatron: Megatron, tmp_path: Path) -> None:
    """Megatron then goes back to the persistent one; where that is newer, nothing is lost."""
    newest = tmp_path / "non_persistent"
    put(tmp_path, 2)
    put(newest, 3)
    args = arguments(load=str(tmp_path), non_persistent_ckpt_type="global")
    for text in (None, "release", "3 and"):
        name(newest, text)
        (line,) = check_trackers(asked_at_start(args))
        assert line.endswith("write 3 into it") and done(line, args, megatron) == newest / "iter_0000003"
        assert chosen(args, megatron) == newest / "iter_0000003"
    name(newest, None)
    put(tmp_path, 4)
    assert [*check_trackers(asked_at_start(args))] == []


def test_an_optimizer_with_a_file_of_its_own_is_that_of_the_tracker(tmp_path: Path) -> None:
    name(tmp_path, "4")
    asked = Asked(load_dir=str(tmp_path), step=2)
    (line,) = overruled(asked, takes_optimizer_of_tracker=True)
    assert line.endswith("names; write 2 into it") and [*overruled(asked)] == []
    name(tmp_path, "2")
    assert [*overruled(asked, takes_optimizer_of_tracker=True)] == []


@pytest.mark.parametrize(("kind", "other"), [("local", None), ("global", "msc://x")])
def test_what_nobody_can_look_into_is_said(kind: str, other: str | None) -> None:
    (line,) = overruled(Asked(load_dir="x", step=2, kind=kind, other=other))
    assert line.endswith("leave --non-persistent-ckpt-type out")
    assert [*overruled(Asked(load_dir="msc://x", step=2, kind=kind, other=other))] == []
