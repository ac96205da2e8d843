"""Finds missing, cut off or damaged files of a Megatron checkpoint, and what can be loaded instead.

A folder of checkpoints has the file ``latest_checkpointed_iteration.txt``, which names one of its folders
``iter_0000100`` or ``release``. Such a folder holds, as ``--ckpt-format torch_dist``, ``metadata.json``, ``*.distcp``
and ``.metadata``, which says where in which file each tensor lies; before Megatron 0.19 also ``common.pt``. In the
format ``torch`` it holds a folder ``mp_rank_*`` for each rank of a replica. Where this plugin saved it there is a
manifest, too: files that the ranks read piece by piece are checked then, and all others here.
"""

from __future__ import annotations

import contextlib
import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.index import INDEX, Index, stored_lengths
from vtp_plugin.checkpoint.format.manifest import (
    MANIFEST,
    Manifest,
    load_manifest,
    problems_of_pieces,
    problems_of_sizes,
)
from vtp_plugin.checkpoint.format.resolver import (
    RELEASE,
    TRACKER,
    Asked,
    Found,
    number_of,
    numbers_in,
    of_iteration,
    read_tracker,
)
from vtp_plugin.errors import ConfigError, VtpError, refuse
from vtp_plugin.util.untrusted_files import PathError, problem_of, read_json

COMMON_FILE: Final = "common.pt"
"""The name of the file with what all ranks share; from Megatron 0.19 on that is an object beside the tensors."""
TORCH_DIST: Final = "torch_dist"
"""The format of checkpoints that any layout loads."""


def check_trackers(asked: Asked) -> Iterator[str]:
    """Say what is wrong with the notes about the newest checkpoints of the folders that a run looks into.

    A folder without note and without a whole checkpoint is right: the run that writes into it begins. ``--ckpt-step``
    needs no tracker; but Megatron reads one that is there.

    Args:
        asked: where the run looks.

    Yields:
        Lines ``value; rule; way out``.

    Raises:
        ConfigError: a tracker is no regular file, or too long.
    """
    passed_over = replace(asked, load_dir=asked.passed_over, kind=None).folders
    for folder, is_persistent in (*asked.folders, *passed_over):
        text = asked.tracker(folder)
        is_right = text is not None and re.fullmatch(r"\d+|release" if is_persistent else r"\d+", text)
        if is_right or folder in asked.trackers:
            continue
        whole = iterations(folder, is_whole=True)
        is_older = not is_persistent and max(whole, default=-1) < number_of(asked.tracker(asked.folder))
        if text is None and (asked.step or not whole or is_older):
            continue
        shown = "is missing" if text is None else f"holds {text[:40]!r}" if text else "is empty"
        rule = f"it must hold the iteration of a checkpoint{', or the word release' if is_persistent else ''}"
        none = "load another folder, or leave --load out" if is_persistent else "move its folder away"
        yield f"{folder / TRACKER} {shown}; {rule}; {f'write {whole[-1]} into it' if whole else none}"


def check_files(asked: Asked, index: Index | None = None) -> tuple[str, ...]:
    """Name the first broken file of the checkpoint that a run would load.

    Args:
        asked: where the run looks; what is no path is not looked at.
        index: index of the checkpoint, if the caller has read it.

    Returns:
        A line ``value; rule; way out``; none where all files are there and as long as they must be.
    """
    if (found := asked.resolve()) is None:
        return ()
    if not found.checkpoint.is_dir():
        is_step = asked.step and found.name == str(asked.step)
        problem = f"{found.checkpoint} is missing; {'--ckpt-step' if is_step else TRACKER} names it"
    elif (broken := broken_file(found.checkpoint, index)) is not None:
        problem = f"{broken}; without it this checkpoint cannot be loaded"
    else:
        return ()
    return (f"{problem}; {way_out(found.checkpoint, asked)}",)


def way_out(checkpoint: Path, asked: Asked | None = None) -> str:
    """Say what to do about a checkpoint that cannot be loaded.

    Args:
        checkpoint: its folder.
        asked: where the run looks that would load it; None where only its folder is known.
    """
    found = None if asked is None else asked.resolve()
    if asked is None or found is None or found.checkpoint != checkpoint:
        found = Found(checkpoint.parent, checkpoint.name.removeprefix("iter_").lstrip("0"))
        asked = Asked(load_dir=str(found.folder))
    others = [
        other
        for folder, is_persistent in dict.fromkeys((*asked.folders, *asked.chosen_from().folders))
        for number in iterations(folder, is_whole=True)
        if (other := Found(folder, str(number), is_persistent)).checkpoint != checkpoint
    ]
    # The newest of the older ones first; a release has no place among them.
    is_after = {other: found.name != RELEASE and other.rank > found.rank for other in others}
    for other in sorted(others, key=lambda other: (not is_after[other], other.rank), reverse=True):
        if (way := _way_to(other, asked, checkpoint)) is not None:
            return f"copy it again, or load {'another' if is_after[other] else 'an older'} one with {way}"
    return "copy it again, or load another folder"


def _way_to(other: Found, asked: Asked, broken: Path) -> str | None:
    """Name the flag with which a run loads another checkpoint than a broken one, or None."""
    if replace(asked, step=int(other.name)).resolve() == other:
        return f"--ckpt-step {other.name}"
    others = (each for each in asked.chosen_from().candidates() if each.checkpoint != broken)
    whole = (each for each in others if broken_file(each.checkpoint) is None)
    if next(whole, None) != other:
        return None
    return f"--vtp-load-newest-valid{'' if asked.step is None else f', without --ckpt-step {asked.step}'}"


def find_checkpoint(folder: Path, *, takes_any: bool = False) -> Path:
    """Return the checkpoint that a user means: the folder itself, or the newest one in it. None of its files is read.

    Args:
        folder: the folder that the user named.
        takes_any: whether one of the format ``torch`` is found, too.

    Raises:
        ConfigError: neither is there, or the file that names the newest one names none.
    """
    if any((folder / name).exists() for name in ("metadata.json", ".metadata", MANIFEST)):
        return folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; a checkpoint is one; give its path")
    if any(folder.glob("mp_rank_*")):
        return _readable(folder, takes_any)
    name = read_tracker(folder)
    if name is None:
        raise ConfigError(
            f"{folder} holds neither a checkpoint nor {TRACKER}; a checkpoint has a file .metadata; give a folder like "
            "iter_0000100, or the one that holds it"
        )
    refuse(check_trackers(Asked(load_dir=str(folder))))
    checkpoint = of_iteration(folder, name)
    if not checkpoint.is_dir():
        raise ConfigError(f"{checkpoint} is missing; {TRACKER} names it; copy it again, or give another folder")
    return _readable(checkpoint, takes_any)


def _readable(checkpoint: Path, takes_any: bool) -> Path:
    """Return a checkpoint, unless it has the format ``torch``, which only some of the tools take.

    Raises:
        ConfigError: it has.
    """
    if not takes_any and any(checkpoint.glob("mp_rank_*")):
        raise ConfigError(
            f"{checkpoint} has the format torch, one file for each rank; these tools read torch_dist; load it and save "
            "it with --ckpt-format torch_dist"
        )
    return checkpoint


@contextlib.contextmanager
def naming_broken_files(asked: Asked | None) -> Iterator[None]:
    """Run what loads a checkpoint; where it fails because of a broken file, raise an error that names the file.

    So a rank tells of a file that only it sees, such as in a copy on its machine.

    Args:
        asked: where the run looks; None where that is not known.

    Raises:
        ConfigError: instead of any other error, if a file is broken. Files are checked only after an error.
    """
    try:
        yield
    except VtpError:
        raise
    except BaseException as error:  # torch's CheckpointException is none of Exception, and Megatron leaves by exit()
        if (own_error := _own_error(error)) is not None:
            raise own_error from error
        problems = () if asked is None else check_files(asked)
        if not problems:
            raise
        raise ConfigError(problems[0]) from error


def _own_error(error: BaseException) -> VtpError | None:
    """Find the plugin's own error inside torch's, which contains the errors of all ranks."""
    failures: Any = getattr(error, "failures", None)
    found = (wrapped[0] for wrapped in failures.values()) if isinstance(failures, dict) else ()
    return next((each for each in found if isinstance(each, VtpError)), None)


def iterations(folder: Path, *, is_whole: bool = False) -> list[int]:
    """Give the iterations of the checkpoints in a folder, in order.

    Args:
        folder: the folder of the checkpoints.
        is_whole: whether only those count in which no file is missing or too short; files are hardly read for that.
    """
    return [
        number
        for number in numbers_in(folder)
        if not is_whole or broken_file(of_iteration(folder, str(number))) is None
    ]


def is_read_in_pieces(name: str) -> bool:
    """Tell whether ranks check a file of a checkpoint while they load it.

    >>> is_read_in_pieces("__0_0.distcp"), is_read_in_pieces("mp_rank_00/model_optim_rng.pt")
    (True, True)
    >>> is_read_in_pieces("metadata.json")
    False
    """
    return name.endswith(".distcp") or name.startswith("mp_rank_")


def broken_file(checkpoint: Path, index: Index | None = None) -> str | None:
    """Name the first broken file of a checkpoint, with what is wrong; None if there is none.

    Of files that are read in pieces only the length is looked at.

    Args:
        checkpoint: folder of the checkpoint.
        index: its index, if the caller has read it.
    """
    try:
        return broken_beside(checkpoint, load_manifest(checkpoint), index)
    except ConfigError as error:
        return str(error).partition(";")[0]


def broken_beside(checkpoint: Path, manifest: Manifest | None, index: Index | None = None) -> str | None:
    """Do as :func:`broken_file`, with the manifest that the caller has read, or without one."""
    if manifest is not None:
        shared = manifest.of_files([name for name in manifest.sizes if not is_read_in_pieces(name)])
        problems = (*problems_of_sizes(checkpoint, manifest), *problems_of_pieces(checkpoint, shared))
        if problems:
            return problems[0]
    if any(checkpoint.glob("mp_rank_*")):
        files = sorted(checkpoint.glob("mp_rank_*/*.pt"))
        return next((problem for file in files if (problem := _archive_problem(file))), None)
    if (problem := problem_of_config(checkpoint)) is not None:
        return problem
    file_of_index = checkpoint / INDEX
    try:
        lengths, has_common = stored_lengths(file_of_index) if index is None else index.lengths()
    except FileNotFoundError:
        return f"{file_of_index} is missing or cannot be read"
    except OSError as error:
        return f"{file_of_index} cannot be read ({error.strerror})"
    except PathError as error:
        return f"{file_of_index} names a file that it must not ({error})"
    except Exception:  # whatever a damaged pickle raises
        return f"{file_of_index} is damaged"
    for name, length in sorted(lengths.items()):
        file = checkpoint / name
        if (problem := problem_of(file)) is not None:
            return f"{file} {problem}"
        if (found := file.stat().st_size) < length:
            return f"{file} is cut off, with {found} of {length} bytes"
    return None if has_common else _archive_problem(checkpoint / COMMON_FILE)


def problem_of_config(checkpoint: Path) -> str | None:
    """Say what is wrong with the file that says in which format a checkpoint is, or None."""
    config = checkpoint / "metadata.json"
    try:
        read = read_json(config)
    except FileNotFoundError:
        return f"{config} is missing or cannot be read"
    except OSError as error:
        return f"{config} cannot be read ({error.strerror})"
    except ValueError:
        return f"{config} is damaged"
    return None if isinstance(read, dict) else f"{config} is damaged"


def format_of(checkpoint: Path) -> object:
    """Return the format that a checkpoint says it has; None if it does not say, or nobody can read it."""
    try:
        return read_json(checkpoint / "metadata.json").get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return None


def _archive_problem(file: Path) -> str | None:
    """Say what is wrong with a file of ``torch.save``, whose table of contents is its end."""
    if (problem := problem_of(file)) is not None:
        return f"{file} {problem}"
    return None if zipfile.is_zipfile(file) else f"{file} is cut off or damaged"
