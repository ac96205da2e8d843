"""Cards that failed before, and what is noted of failures for the next start."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vtp_plugin.checkpoint.save.atomic_dir import write_whole
from vtp_plugin.elastic.progress import RUN_FOLDER_VARIABLE, leave_marker, note_failed_start
from vtp_plugin.errors import VtpError
from vtp_plugin.runtime.health.redaction import describe_error
from vtp_plugin.util import log
from vtp_plugin.util.typed_json import read_json, read_text

if TYPE_CHECKING:
    from vtp_plugin.elastic.cards import RankCard


def note_for_next_start(error: BaseException, is_consequence: bool) -> None:
    """Note the error that ends this process for later starts, if this process failed first.

    Args:
        error: error that ends this process.
        is_consequence: whether another rank failed before.
    """
    if is_consequence:
        return
    if isinstance(error, VtpError) and error.is_final:
        leave_marker(describe_error(error))
    note_error(error)
    note_failed_start(error)


MEMORY = "vtp_cards.json"
"""The name of the file."""
CARD_VARIABLE = "VTP_CARD"
"""Set in the ranks of a fitted run: the card that a rank has."""
SILENT = "hanging"
"""First word of a card's ``why`` where it did not answer in time: it, or its machine, which may be busy."""
UNTESTED = ("slow", "untested")
"""First words of it where the test of the card did not come so far as to try it."""
_MOST_FAILURES = 2
_HEALTHY_STARTS = 2
"""So many, one after the other, forgive that a card did not answer in time."""
_ERROR = "vtp_card_error."
# What a device reports of itself; messages of NCCL and HCCL are mostly about another rank.
_OF_A_CARD = re.compile(
    r"\b(CUDA|HIP|NPU|ACL|CUBLAS\w*|CUDNN\w*) error\b|\bECC error|device-side assert", re.IGNORECASE
)


def leave_out(cards: Sequence[RankCard], folder: Path, *, forgives: str = "") -> list[RankCard]:
    """Count cards that failed twice as bad, even if they work now, and remember what was found.

    A card fails when it is bad and was good the last time that it was seen: one that stays bad has failed once. A card
    that works now has failed as well if it reported an error in an earlier attempt (:func:`note_error`).

    A card that did not answer in time may have been on a busy machine. So that counts only where another card of its
    machine has answered, and is forgotten once the card works in two starts, one after the other. What a card reported
    is not forgotten. A test that did not come so far as to try the card says nothing of it.

    Args:
        cards: cards of all ranks of this attempt.
        folder: folder of the run's checkpoints.
        forgives: name of a start that forgets, once, what was remembered; empty to keep it.

    Returns:
        The cards, in their order.
    """
    path = folder / MEMORY
    known: dict[str, Any] = _read(path)
    if forgives and known.get("forgiven by") != forgives:
        known = {"forgiven by": forgives, "cards": {}}
    remembered: dict[str, Any] = known.setdefault("cards", {})
    answering = {card.node for card in cards if kind_of(card.why) not in (*UNTESTED, SILENT, "absent")}
    found = []
    for card in cards:
        name, kind = name_card(card), kind_of(card.why)
        entry = _whole(remembered.get(name, {"failures": 0, "is bad": False, "why": ""}))
        is_unknown = kind in UNTESTED or (kind == SILENT and card.node not in answering)
        for why in (card.reported, "" if is_unknown else card.why):
            if why:
                remembered[name] = entry = _after_failure(entry, why)
        if not card.why and name in remembered:
            remembered[name] = entry = {**entry, "is bad": False, "healthy": entry["healthy"] + 1}
            if entry["healthy"] >= _HEALTHY_STARTS and entry["silent"]:
                entry |= {"failures": entry["failures"] - entry["silent"], "silent": 0, "why": entry["error"]}
            if entry["failures"] >= _MOST_FAILURES:
                why = f"excluded: it failed {entry['failures']} times, the last time as {entry['why']}"
                card = replace(card, why=f"{why}; --vtp-forgive uses it again")
        found.append(card)
    _write(path, known)
    return found


def kind_of(why: str) -> str:
    """Return the first word of a card's ``why``, its kind; behind it stands what its site shows.

    >>> kind_of("hanging: no answer within 18 s"), kind_of("slow (why stays at its site)"), kind_of("")
    ('hanging', 'slow', '')
    """
    return re.split(r"\W", why, maxsplit=1)[0]


def _whole(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Complete what an older version has written, which kept only the last reason."""
    is_silent = kind_of(entry["why"]) == SILENT
    error = "unknown" if is_silent and entry["failures"] > 1 else "" if is_silent else entry["why"]
    return {"silent": int(is_silent), "error": error, "healthy": 0, **entry}


def _after_failure(entry: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Note that a card is bad: a failure if it was good; what it reports is kept beside what may be forgiven."""
    is_new, is_silent = not entry["is bad"], kind_of(why) == SILENT
    has_reported = not is_new and not is_silent and kind_of(entry["why"]) == SILENT  # in the end
    return {
        "failures": entry["failures"] + is_new,
        "is bad": True,
        "why": entry["why"] if is_silent and not is_new else why,
        "silent": entry["silent"] + (is_new and is_silent) - has_reported,
        "error": entry["error"] if is_silent else why,
        "healthy": 0,
    }


def name_card(card: RankCard) -> str:
    """Return the name of a card in the memory."""
    return f"{card.node} local rank {card.local_rank}"


def note_error(error: BaseException, environment: Mapping[str, str] = os.environ) -> None:
    """Note an error that shows that this rank's card fails, for the next attempt; ignore any other error.

    Args:
        error: error that ends this process.
        environment: variables of this process; in a fitted run they name the card and the folder.
    """
    folder, name, text = environment.get(RUN_FOLDER_VARIABLE), environment.get(CARD_VARIABLE), str(error)
    if folder and name and _OF_A_CARD.search(text) and "out of memory" not in text:
        with contextlib.suppress(OSError):
            _error_path(Path(folder), name).write_text(text.strip().splitlines()[0], encoding="utf-8")


def _error_path(folder: Path, name: str) -> Path:
    return folder / f"{_ERROR}{re.sub(r'[^A-Za-z0-9.-]', '_', name)}"


def reported_error(folder: Path, name: str) -> str:
    """Read what a card has reported into the folder of its site; empty if there is nothing."""
    with contextlib.suppress(OSError):
        return read_text(_error_path(folder, name)) or "an error"
    return ""


def forget_error(folder: Path, name: str) -> None:
    """Delete what a card has reported, once all know it."""
    with contextlib.suppress(OSError):
        _error_path(folder, name).unlink()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning(f"{path} cannot be read ({error}); which devices failed is not known")
        return {}
    cards = found.get("cards", {}) if isinstance(found, dict) else None
    if isinstance(cards, dict) and all(map(_is_entry, cards.values())):
        return found
    log.warning(f"{path} is no memory of devices; which ones failed is not known")
    return {}


def _is_entry(entry: object) -> bool:
    kinds = {"failures": int, "is bad": bool, "why": str, "silent": int, "error": str, "healthy": int}
    return (
        isinstance(entry, dict)
        and entry.keys() >= {"failures", "is bad", "why"}
        and all(type(each) is kinds.get(name) for name, each in entry.items())
    )


def _write(path: Path, known: dict[str, Any]) -> None:
    if not known["cards"] and not path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(known, indent=1))
    except OSError as error:
        log.warning(f"{path} cannot be written ({error.strerror}); failed devices are not remembered")
