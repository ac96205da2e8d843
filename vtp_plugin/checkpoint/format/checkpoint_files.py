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
from vtp_plugin.errors import ConfigError, VtpError, refuse
from vtp_plugin.util.untrusted_files import PathError, problem_of, read_bytes, read_json

COMMON_FILE: Final = "common.pt"
"""The name of the file with what all ranks share; from Megatron 0.19 on that is an object beside the tensors."""
TRACKER: Final = "latest_checkpointed_iteration.txt"
"""The name of the file that says which checkpoint of a folder is the newest."""
TORCH_DIST: Final = "torch_dist"
"""The format of checkpoints that any layout loads."""
_MAX_TRACKER_BYTES: Final = 200


def read_tracker(folder: Path) -> str | None:
    """Return what the note about the newest checkpoint of a folder says; None if there is none.

    Raises:
        ConfigError: it is no regular file, or too long.
    """
    try:
        return read_bytes(folder / TRACKER, _MAX_TRACKER_BYTES).decode(errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(
            f"{folder / TRACKER} cannot be read ({error.strerror}); it must hold the iteration of a checkpoint, or the "
            "word release; remove it, and write that"
        ) from None


def check_tracker(load_dir: str, step: int | None = None) -> tuple[str, ...]:
    """Say what is wrong with the note about the newest checkpoint of a folder.

    A folder without note and without a whole checkpoint is right: the run that writes into it begins.

    Args:
        load_dir: the folder, as in ``--load``; what is no path, such as ``msc://``, is not looked at.
        step: value of ``--ckpt-step``, which needs no tracker; but Megatron reads one that is there.

    Returns:
        A line ``value; rule; way out``, or none.
    """
    if "://" in load_dir:
        return ()
    folder, file = Path(load_dir), Path(load_dir) / TRACKER
    text = read_tracker(folder)
    if text is not None and re.fullmatch(r"\d+|release", text):
        return ()
    whole = iterations(folder, is_whole=True)
    if text is None and (step or not whole):
        return ()
    shown = "is missing" if text is None else f"holds {text[:40]!r}" if text else "is empty"
    way_out = f"write {whole[-1]} into it" if whole else "load another folder, or leave --load out"
    return (f"{file} {shown}; it must hold the iteration of a checkpoint, or the word release; {way_out}",)


def check_files(load_dir: str, step: int | None = None, index: Index | None = None) -> tuple[str, ...]:
    """Name the first broken file of the checkpoint that a run would load.

    Args:
        load_dir: the folder, as in ``--load``; what is no path is not looked at.
        step: value of ``--ckpt-step``; None for the newest checkpoint.
        index: index of the checkpoint, if the caller has read it.

    Returns:
        A line ``value; rule; way out``; none where all files are there and as long as they must be.
    """
    folder = Path(load_dir)
    if "://" in load_dir or (name := str(step) if step else read_tracker(folder)) is None:
        return ()
    checkpoint = of_iteration(folder, name)
    if not checkpoint.is_dir():
        problem = f"{checkpoint} is missing; {'--ckpt-step' if step else TRACKER} names it"
    elif (found := broken_file(checkpoint, index)) is not None:
        problem = f"{found}; without it this checkpoint cannot be loaded"
    else:
        return ()
    return (f"{problem}; {way_out(checkpoint)}",)


def way_out(checkpoint: Path) -> str:
    """Say what to do about a checkpoint that cannot be loaded."""
    others = [
        number
        for number in iterations(checkpoint.parent, is_whole=True)
        if of_iteration(checkpoint.parent, str(number)) != checkpoint
    ]
    name = checkpoint.name.removeprefix("iter_")
    older = [number for number in others if not name.isdecimal() or number < int(name)]
    if older:
        return f"copy it again, or load an older one with --ckpt-step {older[-1]}"
    return f"copy it again, or load {f'another one with --ckpt-step {others[-1]}' if others else 'another folder'}"


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
    refuse(check_tracker(str(folder)))
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


def of_iteration(folder: Path, name: str) -> Path:
    """Return where a checkpoint lies that the tracker names.

    >>> str(of_iteration(Path("runs"), "100")), str(of_iteration(Path("runs"), "release"))
    ('runs/iter_0000100', 'runs/release')
    """
    return folder / (f"iter_{int(name):07d}" if name.isdecimal() else name)


@contextlib.contextmanager
def naming_broken_files(load_dir: str | None, step: int | None) -> Iterator[None]:
    """Run what loads a checkpoint; where it fails because of a broken file, raise an error that names the file.

    So a rank tells of a file that only it sees, such as in a copy on its machine.

    Args:
        load_dir: value of ``--load``.
        step: value of ``--ckpt-step``.

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
        problems = () if load_dir is None else check_files(load_dir, step)
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
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in folder.glob("iter_*"))
    numbers = sorted(int(name.group(1)) for name in names if name)
    return [number for number in numbers if not is_whole or broken_file(of_iteration(folder, str(number))) is None]


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
