"""How far a run came: its last step, what stopped it, and the starts that failed.

Starts that end in the same way before a first step: after a few of them no later start is tried.

A launcher restarts a run whatever ended it. An error that no restart cures is mostly known at once (``is_final``); a
missing file may come back, so such errors are counted. A rank counts only errors of its own, in the folder of its own
site; what another rank or another site says of an end does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import read_bytes, read_typed

MARKER = "vtp_stopped.txt"
"""The name of the file."""
RUN_FOLDER_VARIABLE = "VTP_RUN_FOLDER"
"""Set in the ranks of a run that is restarted automatically: the folder of its checkpoints."""


def run_folder(argv: Sequence[str]) -> Path | None:
    """Return the folder of a run's checkpoints, which its command line names by ``--save``.

    A run that only loads writes nothing beside the checkpoint that it loads, which may be another run's.

    Returns:
        The folder; None if there is none, or it is not one of this machine, such as ``msc://``.

    >>> str(run_folder(["pretrain_gpt.py", "--load", "old", "--save=new", "--lr", "1"]))
    'new'
    >>> run_folder(["pretrain_gpt.py", "--load", "old"]) is None
    True
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--save")
    try:
        args, _ = parser.parse_known_args(list(argv[1:]))
    except argparse.ArgumentError:
        return None  # the script's parser says what is wrong
    name = args.save
    return None if name is None or "://" in name else Path(name)


def require_unmarked(folder: Path | None) -> None:
    """Raise if an earlier start of the run left the marker.

    Raises:
        ConfigError: there is a marker; the text says how the earlier start ended, and where the marker is.
    """
    if folder is None:
        return
    path = folder / MARKER
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8").strip().partition("\n")[0]
        raise ConfigError(f"{text}; no restart cures this; fix it, then remove {path}")


def leave_marker(text: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write the marker, atomically: why no later start can succeed. An older marker stays.

    Args:
        text: error with which this start ends.
        environment: variables of this process; they name the folder if a launcher restarts the run.
    """
    name = environment.get(RUN_FOLDER_VARIABLE)
    if not name:
        return
    way_out = "No later start continues while this file is here: fix that, then remove it."
    put_beside(Path(name) / MARKER, f"{text}\n{way_out}\n", replaces=False)


def put_beside(path: Path, text: str, *, replaces: bool = True) -> None:
    """Write a file atomically; if that fails, do nothing.

    Args:
        path: path of the file; its folder is created.
        text: content of the file.
        replaces: whether to replace a file that is there.
    """
    own = path.with_name(f".{path.name}.{os.getpid()}.{os.uname().nodename}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        with own.open("x", encoding="utf-8") as file:  # never through a link
            file.write(text)
        (own.replace if replaces else functools.partial(os.link, own))(path)
    with contextlib.suppress(OSError):
        own.unlink()


FAILED_STARTS: Final = "vtp_failed_starts.json"
"""The name of the file."""
START_VARIABLE: Final = "VTP_START"
"""Set in a rank of a fitted run until its first step: what its flags are, and a name that only this attempt has."""
MOST_EQUAL: Final = 5
"""So many starts may end in one way."""
_MOST_REASONS, _MOST_CHARS = 20, 500
# A restart cures a peer that is gone, and a machine that joins ends the ranks of all others. What timed out may be
# faster next time.
_OF_A_PEER = re.compile(r"gloo|nccl|hccl|connection|broken pipe|socket|tcpstore|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Noted:
    """Content of the file: the flags of the starts; for each reason the number of starts, and the last of them."""

    flags: str
    reasons: dict[str, tuple[int, str]]


def name_start(argv: Sequence[str], attempt: str, environment: MutableMapping[str, str]) -> None:
    """Let errors of this process count until its first step.

    Args:
        argv: script and flags, as the user gave them: with other flags counting starts again.
        attempt: name of this attempt, equal on all its ranks and different from all other attempts.
        environment: variables of this process; the name of the start is added.
    """
    digest = hashlib.sha256(json.dumps([*argv]).encode()).hexdigest()[:16]
    environment[START_VARIABLE] = f"{digest} {attempt}"


def forget_failed_starts(environment: MutableMapping[str, str] = os.environ) -> None:
    """Note that this start has made a step, or ended well."""
    folder = environment.get(RUN_FOLDER_VARIABLE)
    if environment.pop(START_VARIABLE, "") and folder:
        with contextlib.suppress(OSError):
            (Path(folder) / FAILED_STARTS).unlink()


def note_failed_start(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Count an error that ends this process before its first step; after too many equal ones write the marker.

    Numbers in the texts need not be equal. An error of the plugin counts as the error that caused it: one without a
    cause is either final, or a restart may cure it.

    Args:
        error: error that ends this process, and is not the consequence of another rank's.
        environment: variables of this process; in a fitted run they name the start and the folder.
    """
    folder, reason = environment.get(RUN_FOLDER_VARIABLE), _reason(error)
    flags, _, attempt = environment.get(START_VARIABLE, "").partition(" ")
    if not folder or not attempt or not reason:
        return
    path = Path(folder) / FAILED_STARTS
    reasons = _read_starts(path, flags)
    key = re.sub(r"\d+", "#", reason)
    count, last = reasons.pop(key, (0, ""))
    count += last != attempt  # several ranks may end in one way
    reasons[key] = count, attempt
    put_beside(path, json.dumps({"flags": flags, "reasons": dict([*reasons.items()][-_MOST_REASONS:])}))
    if count < MOST_EQUAL:
        return
    leave_marker(f"{reason}; {count} starts ended like this before their first step", environment)
    with contextlib.suppress(OSError):
        path.unlink()
    log.error(
        f"{count} starts ended like this before their first step, and no other one is tried; fix it, then remove "
        f"{path.with_name(MARKER)}"
    )


def _reason(error: BaseException) -> str:
    """Return the reason that is counted; empty for an error that does not count.

    >>> _reason(VtpError("no answer")), _reason(FileNotFoundError("tok.model")), _reason(KeyboardInterrupt())
    ('', 'FileNotFoundError: tok.model', '')
    """
    cause: BaseException | None = error
    while isinstance(cause, VtpError):
        cause = cause.__cause__
    if cause is None or isinstance(cause, KeyboardInterrupt):
        return ""
    text = describe_error(cause)[:_MOST_CHARS]
    return "" if _OF_A_PEER.search(text) else text


def _read_starts(path: Path, flags: str) -> dict[str, tuple[int, str]]:
    """Read, by reason, how many starts with these flags ended so."""
    try:
        found = read_typed(_Noted, read_bytes(path))
    except (OSError, ValueError):
        return {}
    return found.reasons if found.flags == flags else {}


PROGRESS = "vtp_progress.json"
"""The name of the file."""
_LAST_VARIABLE, _SIZES_VARIABLE = "VTP_LAST_STEP", "VTP_FITTED"
# All records have one length: a new one replaces the old one in one write.
_NUM_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class LastStep:
    """The last step that an attempt has finished.

    Attributes:
        iteration: number of the step; 0 before the first.
        samples: number of samples consumed up to and with the step.
        at_s: when the step was finished, in seconds since 1970, by the clock of the attempt's rank 0.
        sizes: list of sizes in which the step ran.
        is_end: whether training ended with the step.
        later: list of the newest attempt that began afterwards and has not finished a step; empty if there is none.
        num_later: number of such attempts.
    """

    iteration: int
    samples: int
    at_s: float
    sizes: str
    is_end: bool = False
    later: str = ""
    num_later: int = 0

    def followed(self, sizes: str) -> LastStep:
        """Return the note once another attempt has begun, which has not finished a step yet.

        >>> last = LastStep(iteration=7, samples=56, at_s=100.0, sizes="2,2")
        >>> print(last)
        the attempt with TP sizes 2,2 ended after step 7
        >>> print(last.followed("2,1"))
        the attempt with TP sizes 2,1 ended before its first step
        """
        return replace(self, later=sizes, num_later=self.num_later + 1)

    def __str__(self) -> str:
        """Describe how the newest attempt ended, if it did."""
        when = f"after step {self.iteration}" if self.iteration and not self.later else "before its first step"
        return f"the attempt with TP sizes {self.later or self.sizes} ended {when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """What the end of an attempt cost, known once the next one has finished a step.

    Attributes:
        steps: number of steps that were finished before and are repeated.
        samples: number of samples of these steps.
        seconds: time from the last finished step of the previous attempt to the first one of the next.
        text: description of the loss, for the log.
    """

    steps: int
    samples: int
    seconds: float
    text: str


def find_lost(last: LastStep, iteration: int, samples: int, batch_size: int, now_s: float) -> Lost:
    """Compare the first step of an attempt with the last one of the attempt before.

    Args:
        last: last step of the previous attempt.
        iteration: number of the first step of this attempt.
        samples: number of samples consumed after it.
        batch_size: number of samples of the step.
        now_s: when the step was finished, in seconds since 1970.

    >>> last = LastStep(iteration=7, samples=56, at_s=100.0, sizes="2,2")
    >>> lost = find_lost(last, 5, 40, 8, 130.0)
    >>> lost.steps, lost.samples, lost.seconds
    (3, 24, 30.0)
    >>> lost.text
    'lost with TP sizes 2,2: 3 steps and 24 samples are repeated, 30.0 s between step 7 and step 5'
    >>> find_lost(last.followed("2,1"), 5, 40, 8, 130.0).text.partition(":")[0]
    'lost with TP sizes 2,2 and once more with 2,1 before its first step'
    """
    steps = max(0, last.iteration - iteration + 1)
    twice = max(0, last.samples - samples + batch_size)
    seconds = max(0.0, now_s - last.at_s)
    more = f" and once more with {last.later} before its first step" if last.num_later == 1 else ""
    if last.num_later > 1:
        more = f" and {last.num_later} times more before a first step, the last time with {last.later}"
    start = f"step {last.iteration}" if last.iteration else "its start"
    text = (
        f"lost with TP sizes {last.sizes}{more}: {steps} step{'s'[: steps != 1]} and {twice} samples are repeated, "
        f"{seconds:.1f} s between {start} and step {iteration}"
    )
    return Lost(steps=steps, samples=twice, seconds=seconds, text=text)


def read_last(folder: Path) -> LastStep | None:
    """Read how far the last attempt came; None if none has begun, or the last one ended well."""
    try:
        last = read_typed(LastStep, read_bytes(folder / PROGRESS))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning(f"{folder / PROGRESS} cannot be read ({error}); what was lost is not known")
        return None
    return None if last.is_end else last


def write_last(folder: Path, step: LastStep) -> None:
    """Replace the note."""
    text = json.dumps(asdict(step)).ljust(_NUM_BYTES - 1) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        number = os.open(folder / PROGRESS, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        log.warning(f"{folder / PROGRESS} cannot be written ({error.strerror}); what is lost will not be known")
        return
    with contextlib.suppress(OSError):
        os.ftruncate(number, os.write(number, text.encode()))
    os.close(number)


class Progress:
    """Notes every step of a fitted run, and reports at the first one what was lost before it.

    Args:
        folder: folder of checkpoints on the rank that writes; None on others.
        sizes: list of sizes of this attempt.
        last: last step of the previous attempt; None if that ended well, or there was none.
    """

    def __init__(self, folder: Path | None, sizes: str, last: LastStep | None) -> None:
        self._folder = folder
        self._sizes = sizes
        self._last = last

    @classmethod
    def of_process(cls, environment: Mapping[str, str]) -> Progress | None:
        """Read what :func:`hand_on` has stored; None in a run that was not fitted, or has no folder."""
        folder, sizes = environment.get(RUN_FOLDER_VARIABLE), environment.get(_SIZES_VARIABLE)
        if not folder or not sizes:
            return None
        last = json.loads(environment.get(_LAST_VARIABLE, "null"))
        is_writer = environment.get("RANK") == "0"
        return cls(Path(folder) if is_writer else None, sizes, None if last is None else LastStep(**last))

    def note(self, iteration: int, samples: int, batch_size: int) -> Lost | None:
        """Note a finished step, see :func:`find_lost`; at the first one return what was lost, later None."""
        now_s = time.time()
        if self._folder is not None:
            step = LastStep(iteration=iteration, samples=samples, at_s=now_s, sizes=self._sizes)
            write_last(self._folder, step)
        forget_failed_starts()
        last, self._last = self._last, None
        return None if last is None else find_lost(last, iteration, samples, batch_size, now_s)


def hand_on(sizes: str, last: Mapping[str, object] | None, environment: MutableMapping[str, str]) -> None:
    """Store for :meth:`Progress.of_process` what is known before the script starts.

    Args:
        sizes: list of sizes of this attempt.
        last: fields of the last step of the previous attempt.
        environment: variables of this process; they are added to.
    """
    environment[_SIZES_VARIABLE], environment[_LAST_VARIABLE] = sizes, json.dumps(last)


def note_end(folder: Path) -> None:
    """Note that training has ended well, so that a later start does not count it as lost."""
    last = read_last(folder)
    if last is not None:
        write_last(folder, replace(last, is_end=True))
