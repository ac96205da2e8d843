"""Which checkpoint a run loads, and whether the files that a rank reads as a whole are as they were written."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import TORCH_DIST, check_files, check_trackers, format_of
from vtp_plugin.checkpoint.format.index import Index
from vtp_plugin.checkpoint.format.manifest import MANIFEST, Manifest, load_manifest, problems_of_pieces
from vtp_plugin.checkpoint.format.overruled_step import overruled
from vtp_plugin.checkpoint.format.resolver import RELEASE, Asked, Found, number_of
from vtp_plugin.checkpoint.save.newest import problem_of, problem_without_manifest, share_out
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.patches.core.dist_checkpointing.plain_objects import index_of, require_plain, require_plain_checkpoint
from vtp_plugin.runtime.step.measure import read_shared
from vtp_plugin.session import Session
from vtp_plugin.util import log
from vtp_plugin.util.printable import one_line

# As a rank of another site may write them.
_NAME = re.compile(r"[0-9]{1,18}|release")


def look_at(session: Session, asked: Asked, args: Any) -> None:
    """Check that the checkpoint that is to be loaded is the right one, and whole; one rank of each site reads files.

    Args:
        session: the applied plugin.
        asked: where it is looked for.
        args: Megatron's arguments.

    Raises:
        ConfigError: a file is broken, or Megatron loads another one than ``--ckpt-step`` names.
    """
    refuse(check_trackers(asked))
    checkpoint = asked.checkpoint
    is_reporter = args.rank in (session.planned.reporting_ranks.values() if session.is_planned else (0,))
    lines = [*overruled(asked, takes_optimizer_of_tracker=_takes_optimizer_of_tracker(checkpoint, args))]
    if session.is_active:
        refuse(lines)
    if is_reporter:
        for line in (*lines, *_left_behind(asked)):
            log.warning(line)
    # What lies elsewhere is read only if it is newer, which Megatron finds out.
    if is_reporter and args.ckpt_format in ("torch", "torch_dist") and asked.is_certain:
        refuse(check_files(asked, _readable_index(session, checkpoint)))
        if checkpoint is not None and not (checkpoint / MANIFEST).exists():
            log.info(f"{checkpoint} has no {MANIFEST}, so changed bytes cannot be detected")


def _takes_optimizer_of_tracker(checkpoint: Path | None, args: Any) -> bool:
    """Tell whether Megatron reads the optimizer from a file of its own, which it looks for by the tracker."""
    is_asked = args.use_distributed_optimizer and not args.finetune and not args.no_load_optim
    return is_asked and checkpoint is not None and any(checkpoint.glob("mp_rank_*/distrib_optim.pt"))


def _left_behind(asked: Asked) -> Iterator[str]:
    """Say that a run begins again though it has saved a checkpoint that is not persistent."""
    beside = None if asked.passed_over is None else replace(asked, load_dir=asked.passed_over, step=None).resolve()
    if beside is not None and not beside.is_persistent:
        yield (
            f"{beside.checkpoint} is there, and --load {asked.passed_over} has no persistent checkpoint; Megatron then "
            "begins with --pretrained-checkpoint; to resume from there give --vtp-load-newest-valid"
        )


def _readable_index(session: Session, checkpoint: Path | None) -> Index | None:
    """Return the index of a checkpoint; None where there is none, or it cannot be read, which others say better."""
    try:
        return None if checkpoint is None else index_of(session, checkpoint)
    except (ConfigError, OSError):
        return None


def own_file(checkpoint: Path | None, *, is_of_rank_0: bool) -> Path | None:
    """Return the file of the old format that Megatron reads on this rank; None if there is none, or another format.

    Args:
        checkpoint: the one that is to be loaded; None if there is none.
        is_of_rank_0: whether it reads the file of rank 0.
    """
    from megatron.training.checkpointing import find_checkpoint_rank_0, get_checkpoint_name

    if checkpoint is None or not any(checkpoint.glob("mp_rank_*")):
        return None
    is_release = not checkpoint.name.startswith("iter_")
    iteration = 0 if is_release else int(checkpoint.name.removeprefix("iter_"))
    find = find_checkpoint_rank_0 if is_of_rank_0 else get_checkpoint_name
    found = find(str(checkpoint.parent), iteration, is_release)
    return None if found is None else Path(found)


def require_plain_files(session: Session, checkpoint: Path | None, own: Path | None) -> None:
    """Look at what this rank is about to unpickle.

    Args:
        session: the applied plugin.
        checkpoint: the one that is to be loaded; None if there is none.
        own: its file of the old format; None for another one.

    Raises:
        ConfigError: it names what may run, or has a format that the plugin does not look into.
    """
    if own is not None:
        for file in sorted(own.parent.glob("*.pt")):
            require_plain(file, str(file))
        return
    if checkpoint is None:
        return
    require_plain_checkpoint(session, checkpoint)
    found = format_of(checkpoint)
    if session.is_planned and not session.planned.layout.is_uniform and found not in (None, TORCH_DIST):
        raise ConfigError(
            f"checkpoint {checkpoint} has the format {ascii(found)[:40]}; stages of different sizes load {TORCH_DIST}; "
            f"load it with one size, and save it with --ckpt-format {TORCH_DIST}"
        )


def choose(session: Session, asked: Asked, args: Any) -> Found | None:
    """Let Megatron load the newest checkpoint that is whole; all ranks call it, and read a part each.

    Args:
        session: the applied plugin.
        asked: where the run looks.
        args: Megatron's arguments.

    Returns:
        The checkpoint; None if there is none.

    Raises:
        ConfigError: none is whole, or a step is asked for.
    """
    for flag, value in (("--load", asked.load_dir), ("--non-persistent-global-ckpt-dir", asked.other)):
        if "://" in (value or ""):
            raise ConfigError(
                f"--vtp-load-newest-valid with {flag} {value}; it looks into folders; leave it out, or copy the "
                "checkpoints into a folder"
            )
    if asked.step is not None:
        raise ConfigError(f"--vtp-load-newest-valid with --ckpt-step {asked.step}; leave one of them out")
    passed: list[str] = []
    for found in (names := asked.merged(_of_all(session, _read(asked.names)))):
        if not (problem := _agreed(session, _problem_here(found.checkpoint, args))):
            for each in passed:
                log.info(f"skipped: {each}")
            log.info(f"loads {found.checkpoint}, the newest intact checkpoint")
            for folder, is_persistent in asked.folders:  # of two that are alike Megatron takes the other
                hides = found.is_persistent and not is_persistent
                session.savings.trackers[folder] = None if hides else found.name
            return found
        passed.append(problem)
    if names:
        raise ConfigError(f"{asked.load_dir} holds no intact checkpoint: {'; '.join(passed)}; load another folder")
    return None


def settle_trackers(session: Session, asked: Asked) -> None:
    """Let all ranks load the newest checkpoint that one of their trackers names, as Megatron does.

    Sites may have folders of their own, and a run may have been killed before all trackers were written.
    """
    own = _read(lambda: [[name] if (name := asked.tracker(folder)) else [] for folder, _ in asked.folders])
    for (folder, _), mine, names in zip(asked.folders, own, _of_all(session, own), strict=False):
        if names and RELEASE not in names and mine not in ([], names[:1]):
            session.savings.trackers[folder] = names[0]


def _read(names: Callable[[], list[list[str]]]) -> list[list[str]]:
    with contextlib.suppress(ConfigError):  # of a tracker that cannot be read, which is said together
        return names()
    return []


def _of_all(session: Session, own: Sequence[Sequence[str]]) -> Sequence[Sequence[str]]:
    """Give the names of checkpoints that any rank has in each folder: a release, then the newest first."""
    if session.ranks.store is None:
        return own
    posted = {str(place): dict.fromkeys(row, 0.0) for place, row in enumerate(own)}
    joined = read_shared(tuple[tuple[str, ...], ...], session.ranks.share_reports(posted, _join))
    return [[name for name in row if _NAME.fullmatch(name)] for row in joined]


def _join(posts: Sequence[dict[str, dict[str, float]]]) -> str:
    rows = [{name for post in posts for name in post.get(place, ()) if _NAME.fullmatch(name)} for place in ("0", "1")]
    return json.dumps([sorted(row, key=lambda name: (name == RELEASE, number_of(name)), reverse=True) for row in rows])


def _problem_here(checkpoint: Path, args: Any) -> str | None:
    """Say what is wrong with the share of this rank; in the old format those are its own files."""

    def share(manifest: Manifest) -> Callable[[str], bool]:
        if not any(checkpoint.glob("mp_rank_*")):
            return share_out(manifest, args.rank, args.world_size)
        folders = own_folders(checkpoint)
        return lambda name: name.partition("/")[0] in folders

    return problem_of(checkpoint, share)


def own_folders(checkpoint: Path) -> set[str]:
    """Return the names of the folders of the old format that a rank reads; before there are groups, that of rank 0."""
    from megatron.core import parallel_state
    from megatron.training.checkpointing import get_checkpoint_name

    if not parallel_state.model_parallel_is_initialized():
        return {"mp_rank_00", "mp_rank_00_000"}
    return {Path(get_checkpoint_name(str(checkpoint.parent), 0)).parent.name}


def _agreed(session: Session, problem: str | None) -> str:
    """Give all ranks the first problem that one of them found; empty if none did."""
    if session.ranks.store is None:
        return problem or ""
    first: Callable[[Sequence[dict[str, Any]]], str] = lambda found: next((key for each in found for key in each), "")  # noqa: E731
    own = {} if problem is None else {session.ranks.redaction.describe(ConfigError(problem)): {}}
    return one_line(session.ranks.share_reports(own, first))


def check_own_files(session: Session, checkpoint: Path | None) -> None:
    """Compare the files of the old format that this rank reads with their hashes.

    Args:
        session: the applied plugin.
        checkpoint: the one that is to be loaded; None if there is none.

    Raises:
        ConfigError: one has changed.
    """
    if checkpoint is None or not any(checkpoint.glob("mp_rank_*")):
        return
    if (manifest := load_manifest(checkpoint)) is None:
        return
    folders = own_folders(checkpoint)
    own = manifest.of_files([name for name in manifest.sizes if name.partition("/")[0] in folders])
    for problem in problems_of_pieces(checkpoint, own):
        raise ConfigError(
            f"{problem}; without it this checkpoint cannot be loaded; {session.loading.way_out(checkpoint)}"
        )


def require_manifest(session: Session, name: str, stored: Any) -> None:
    """Refuse a checkpoint that was saved with a manifest and has none.

    Args:
        session: the applied plugin.
        name: folder of the checkpoint, or a file in it.
        stored: the arguments that are stored with it.

    Raises:
        ConfigError: it is so.
    """
    # In the old format the name is that of a rank's file.
    checkpoint = Path(name) if Path(name).is_dir() else Path(name).parents[1]
    problem = problem_without_manifest(checkpoint, vars(stored))
    if problem is not None:
        raise ConfigError(
            f"{problem}; without it changed bytes cannot be detected; {session.loading.way_out(checkpoint)}"
        )
