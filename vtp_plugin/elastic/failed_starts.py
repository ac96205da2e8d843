"""Starts that end in the same way before a first step: after a few of them no later start is tried.

A launcher restarts a run whatever ended it. An error that no restart cures is mostly known at once (``is_final``); a
missing file may come back, so such errors are counted. A rank counts only errors of its own, in the folder of its own
site; what another rank or another site says of an end does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vtp_plugin.elastic.stop_marker import MARKER, RUN_FOLDER_VARIABLE, leave_marker, put_beside
from vtp_plugin.errors import VtpError
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import read_typed
from vtp_plugin.util.untrusted_files import read_bytes

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
    reasons = _read(path, flags)
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


def _read(path: Path, flags: str) -> dict[str, tuple[int, str]]:
    """Read, by reason, how many starts with these flags ended so."""
    try:
        found = read_typed(_Noted, read_bytes(path))
    except (OSError, ValueError):
        return {}
    return found.reasons if found.flags == flags else {}
