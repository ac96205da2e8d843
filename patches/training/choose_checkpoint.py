"""Which checkpoint a run loads, and whether the files that a rank reads as a whole are as they were written."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import (
    TORCH_DIST,
    TRACKER,
    check_files,
    check_tracker,
    format_of,
    of_iteration,
    read_tracker,
    way_out,
)
from vtp_plugin.checkpoint.format.index import Index
from vtp_plugin.checkpoint.format.manifest import MANIFEST, Manifest, load_manifest, problems_of_pieces
from vtp_plugin.checkpoint.save.newest import candidates, problem_of, problem_without_manifest, share_out
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.patches.core.dist_checkpointing.plain_objects import index_of, require_plain, require_plain_checkpoint
from vtp_plugin.session import Session
from vtp_plugin.util import log
from vtp_plugin.util.printable import one_line


def look_at(session: Session, load_dir: str, args: Any, checkpoint: Path | None) -> None:
    """Check that the checkpoint that is to be loaded is whole; one rank of each site looks at its files.

    Args:
        session: the applied plugin.
        load_dir: folder of checkpoints, the value of ``--load``.
        args: Megatron's arguments.
        checkpoint: what :func:`loaded` gives.

    Raises:
        ConfigError: a file is broken.
    """
    if load_dir in session.savings.trackers:  # all of it has been read
        return
    refuse(check_tracker(load_dir, args.ckpt_step))
    is_reporter = args.rank in (session.planned.reporting_ranks.values() if session.is_planned else (0,))
    # What lies elsewhere is read only if it is newer, which Megatron finds out.
    if is_reporter and args.ckpt_format in ("torch", "torch_dist") and args.non_persistent_ckpt_type is None:
        refuse(check_files(load_dir, args.ckpt_step, _readable_index(session, checkpoint)))
        if checkpoint is not None and not (checkpoint / MANIFEST).exists():
            log.info(f"{checkpoint} has no {MANIFEST}, so changed bytes cannot be detected")


def _readable_index(session: Session, checkpoint: Path | None) -> Index | None:
    """Return the index of a checkpoint; None where there is none, or it cannot be read, which others say better."""
    try:
        return None if checkpoint is None else index_of(session, checkpoint)
    except (ConfigError, OSError):
        return None


def chosen_step(session: Session, load_dir: str | None, args: Any) -> int | None:
    """Return the iteration that is loaded, if it is another one than the tracker names; None otherwise."""
    stand_in = session.savings.trackers.get(str(load_dir))
    text = "" if stand_in is None else stand_in.read_text()
    return int(text) if text.isdecimal() else args.ckpt_step


def loaded(session: Session, load_dir: str | None, args: Any) -> Path | None:
    """Return the checkpoint that Megatron will load from a folder; None if there is none, or the folder is no path."""
    if load_dir is None or "://" in load_dir:
        return None
    folder = Path(load_dir)
    name = str(chosen_step(session, load_dir, args) or read_tracker(folder) or "")
    return of_iteration(folder, name) if name else None


def own_file(checkpoint: Path | None, *, is_of_rank_0: bool) -> Path | None:
    """Return the file of the old format that Megatron reads on this rank; None if there is none, or another format.

    Args:
        checkpoint: what :func:`loaded` gives.
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
        checkpoint: what :func:`loaded` gives.
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


def choose(session: Session, load_dir: str, args: Any) -> None:
    """Let Megatron load the newest checkpoint of a folder that is whole; all ranks call it, and read a part each.

    Raises:
        ConfigError: none is whole, or a step is asked for.
    """
    folder = Path(load_dir)
    if "://" in load_dir:
        raise ConfigError(
            f"--vtp-load-newest-valid with --load {load_dir}; it looks into folders; leave it out, or copy the "
            "checkpoints into a folder"
        )
    if args.ckpt_step:
        raise ConfigError(f"--vtp-load-newest-valid with --ckpt-step {args.ckpt_step}; leave one of them out")
    passed: list[str] = []
    names = candidates(folder)
    if session.ranks.store is not None:
        session.ranks.agree("checkpoints to choose from", lambda: {"checkpoints in --load": ",".join(names)})
    for name in names:
        checkpoint = of_iteration(folder, name)
        problem = _agreed(session, _problem_here(checkpoint, args))
        if not problem:
            _load_it(session, folder, name, passed, args)
            return
        passed.append(problem)
    if names:
        raise ConfigError(f"{load_dir} holds no intact checkpoint: {'; '.join(passed)}; load another folder")


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


def _load_it(session: Session, folder: Path, name: str, passed: Sequence[str], args: Any) -> None:
    """Let Megatron find a checkpoint in the place of what the tracker names."""
    for problem in passed:
        log.info(f"skipped: {problem}")
    if passed or read_tracker(folder) != name:
        stand_in = session.savings.scratch(f"{TRACKER}.loaded")
        stand_in.write_text(name)
        session.savings.trackers[os.fspath(folder)] = stand_in
        log.info(f"loads {of_iteration(folder, name)}, the newest intact checkpoint")


def check_own_files(checkpoint: Path | None) -> None:
    """Compare the files of the old format that this rank reads with their hashes.

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
        raise ConfigError(f"{problem}; without it this checkpoint cannot be loaded; {way_out(checkpoint)}")


def require_manifest(name: str, stored: Any) -> None:
    """Refuse a checkpoint that was saved with a manifest and has none.

    Raises:
        ConfigError: it is so.
    """
    # In the old format the name is that of a rank's file.
    checkpoint = Path(name) if Path(name).is_dir() else Path(name).parents[1]
    problem = problem_without_manifest(checkpoint, vars(stored))
    if problem is not None:
        raise ConfigError(f"{problem}; without it changed bytes cannot be detected; {way_out(checkpoint)}")
