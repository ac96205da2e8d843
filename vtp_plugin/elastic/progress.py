"""How far a run has come, noted beside the checkpoint at every step, and what was lost when an attempt ended early."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from vtp_plugin.elastic.failed_starts import forget_failed_starts
from vtp_plugin.elastic.stop_marker import RUN_FOLDER_VARIABLE
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import read_typed
from vtp_plugin.util.untrusted_files import read_bytes

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
