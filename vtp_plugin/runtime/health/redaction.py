"""What may be told to others, and where it is told: redaction, the launcher's file of errors, files of lines.

What a rank may tell the others about an error, and about what it was started with.

An exception's text can hold anything: a sample, a path, a line of the user's source. Within one site all ranks read it.
Between sites only these cross: the rank, the site, the type of the exception, what the plugin says about its layout
flags (:class:`~vtp_plugin.errors.LayoutError`, or the ``shared`` text of another error), and digests of values to
compare.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.util.text import one_line, plain

SHARED_NAMES = frozenset(
    {
        "vtp_plugin version",
        "megatron-core version",
        "vtp_size_list",
        "vtp_cp_list",
        "vtp_dp_list",
        "vtp_ep_list",
        "vtp_etp_list",
        "vtp_in_flight",
        "vtp_costs",
        "vtp_link_is_protected",
        "dp mode",
        "world size",
        "rank order",
        "transport",
        "sites",
        "--vtp-sites on the command line",
        "platform",
        "forced",
        "timeout_s",
        "schedule",
        "layerwise disaggregated",
        "vocabulary of the edge",
        "vtp_size_list of the checkpoint",
        "iteration of the checkpoint",
        "checkpoint found in --load",
        "non-persistent checkpoint found",
        "whether --save is given",
        "whether --load is given",
        "whether --pretrained-checkpoint is given",
    }
)
"""Values that may cross between sites: the plugin's layout flags, versions, and what both sites know anyway."""

HIDDEN = "a value that is shown there only"
_OPT_IN = "--vtp-share-errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redaction:
    """What this rank may tell the others.

    Attributes:
        is_one_site: whether all ranks have the same options, and these name at most one site; False until that is
            known.
        is_opted_in: whether the user lets full texts and values cross between sites.
        site: site of this rank; None until it is known.
        names_one_site: whether this rank's own flags name at most one site, before they are compared with the others'.

    >>> between = Redaction(site="edge")
    >>> between.describe(ValueError("sample 4711"))
    'ValueError at site edge, whose text stays there (--vtp-share-errors on that site shows it here)'
    >>> Redaction(is_one_site=True).describe(ValueError("sample 4711"))
    'ValueError: sample 4711'
    """

    is_one_site: bool = False
    is_opted_in: bool = False
    site: str | None = None
    names_one_site: bool = False

    @property
    def is_full(self) -> bool:
        """Whether whole texts and all values may be posted."""
        return self.is_one_site or self.is_opted_in

    @property
    def trusts_coordinator(self) -> bool:
        """Whether this rank believes rank 0 that no restart cures an error, and so writes the marker to its disk."""
        return self.is_one_site or self.names_one_site

    def describe(self, error: BaseException) -> str:
        """Return an exception as one line that may be posted."""
        if self.is_full:
            return describe_error(error)
        shared = error.shared if isinstance(error, VtpError) else None
        if shared is not None and not names_a_path(shared):
            return first_line(shared)
        where = "on that rank" if self.site is None else f"at site {self.site}"
        return f"{type(error).__name__} {where}, whose text stays there ({_OPT_IN} on that site shows it here)"

    def reason(self, why: str) -> str:
        """Return why a card is bad; between sites only the kind of failure, which stands before a colon.

        >>> Redaction(site="edge").reason("erring: its test ended with 1 (/home/me/x.py)")
        'erring (why stays at its site; --vtp-share-errors there shows it here)'
        """
        kind, colon, _ = why.partition(":")
        return why if self.is_full or not colon else f"{kind} (why stays at its site; {_OPT_IN} there shows it here)"

    def name(self, host: str) -> str:
        """Return the name of a machine; between sites a hash of it, which is the same each time.

        >>> Redaction().name("edge-host-7"), Redaction(is_one_site=True).name("edge-host-7")
        ('host-845c3b7a', 'edge-host-7')
        """
        return host if self.is_full else f"host-{hashlib.sha256(host.encode()).hexdigest()[:8]}"

    def state(self, statement: Mapping[str, object]) -> dict[str, object]:
        """Return values to compare, in the form in which they may be posted.

        Within one site these are the values. Between sites each becomes ``{"digest": ...}``, with ``"value"`` if the
        other site may read it. The digests tell whether two values are equal.

        >>> Redaction().state({"vtp_size_list": "1,2"})["vtp_size_list"]["value"]
        '1,2'
        >>> "value" in Redaction().state({"--my-folder": "/home"})["--my-folder"]
        False
        """
        if self.is_one_site:
            return dict(statement)
        return {name: self._digested(name, value) for name, value in statement.items()}

    def _digested(self, name: str, value: object) -> dict[str, object]:
        text = json.dumps(value, sort_keys=True, default=str)
        digested: dict[str, object] = {"digest": hashlib.sha256(f"{name}={text}".encode()).hexdigest()[:16]}
        if self.is_opted_in or (name in SHARED_NAMES and not names_a_path(str(value))):
            digested["value"] = value
        return digested


def show_stated(stated: object) -> str:
    """Return a value of :meth:`Redaction.state` as text for a message.

    >>> show_stated("1,2"), show_stated({"digest": "ab", "value": 3}), show_stated({"digest": "ab"})
    ('1,2', '3', 'a value that is shown there only')
    """
    if isinstance(stated, dict) and "digest" in stated:
        return one_line(str(stated["value"])) if "value" in stated else HIDDEN
    return one_line(str(stated))


def is_same_value(one: object, other: object) -> bool:
    """Compare two values of :meth:`Redaction.state`. One rank may show its value where another hides it.

    >>> is_same_value({"digest": "ab", "value": 3}, {"digest": "ab"})
    True
    """
    if isinstance(one, dict) and isinstance(other, dict) and "digest" in one and "digest" in other:
        return one["digest"] == other["digest"]
    return one == other


def names_a_path(text: str) -> bool:
    r"""Tell whether a text may hold a file's path: a slash beside a letter, or a backslash.

    >>> names_a_path("--vtp-size-list /home/me"), names_a_path("C:\\x"), names_a_path("4 ranks / 2 ranks a replica")
    (True, True, False)
    """
    return re.search(r"[/\\]\S|\S[/\\]", text) is not None


def describe_error(error: BaseException) -> str:
    """Return an exception as one line: a plugin error's text, another error's type and text, or where it was raised.

    >>> describe_error(VtpError("no stages")), describe_error(KeyError("x")), describe_error(SystemExit())
    ('no stages', "KeyError: 'x'", 'SystemExit')
    """
    text = first_line(str(error))
    if isinstance(error, VtpError):
        return text
    name = type(error).__name__
    if text:
        return f"{name}: {text}"
    # Many of Megatron's checks are bare asserts: only the source line says which check it was.
    frames = traceback.extract_tb(error.__traceback__)
    return f"{name} at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else name


def first_line(text: str) -> str:
    """Return the first line that is not empty, without the place in gloo's source that it may begin with.

    >>> first_line("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711")
    'Connection closed by peer [127.0.0.1]:4711'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^\[\S+\.cc:\d+\] ", "", lines[0]) if lines else ""


SPEAKER_VARIABLE = "VTP_SPEAKER"
"""Set in the ranks of a fitted run: local rank of the first rank of this machine that is not spare."""
START_PATIENCE_S = 30.0
"""How long a rank waits at the start for the first rank of its machine to speak, which imports what the others do."""
# Torchrun names the rank with the earliest whole second as the root cause.
_LATER_S = 2
_LOOK_S = 0.02


def write_error_file(line: str, *, is_consequence: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Tell torchrun why this rank ends, in the format of torch's ``ErrorHandler``, unless that was done before.

    Torch's own handler would show the traceback instead of the line.

    Args:
        line: what this rank says.
        is_consequence: whether another rank failed first and is the root cause.
        environment: variables of this process, among them torchrun's ``TORCHELASTIC_ERROR_FILE``.
    """
    name = environment.get("TORCHELASTIC_ERROR_FILE")
    if not name or Path(name).exists():
        return
    seconds = int(time.time()) + (_LATER_S if is_consequence else 0)
    line = plain(line)  # torchrun prints it as it is
    message = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(seconds)}}
    with contextlib.suppress(OSError):
        Path(name).write_text(json.dumps({"message": message}))


def say_once(
    line: str, say: Callable[[str], object], *, limit_s: float, environment: Mapping[str, str] = os.environ
) -> None:
    """Say why all ranks of a machine end, on the first of them; on the others wait until it has, and tell torchrun.

    Torchrun ends all its ranks once one has ended, so the others must not end before the first has spoken.

    Args:
        line: the reason, which all ranks of this machine have found.
        say: prints it.
        limit_s: how long to wait for the first rank; if it has not spoken by then, this one does.
        environment: variables of this process.
    """
    if _is_said_by_first(limit_s, environment):
        write_error_file("the first rank of this machine says why", is_consequence=True, environment=environment)
    else:
        say(line)
        write_error_file(line, is_consequence=False, environment=environment)


def _is_said_by_first(limit_s: float, environment: Mapping[str, str]) -> bool:
    """Wait until the error file of the first rank is there.

    Returns:
        False if this rank is the first, if no torchrun has started it, or if the first says nothing.
    """
    name, local = environment.get("TORCHELASTIC_ERROR_FILE", ""), environment.get("LOCAL_RANK", "")
    own, first = Path(name), environment.get(SPEAKER_VARIABLE, "0")
    file = own.parent.parent / first / own.name
    if not name or local == first or own.parent.name != local or not file.parent.is_dir():
        return False
    deadline_s = time.monotonic() + limit_s
    while not (is_there := file.exists()) and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)
    return is_there


class LineFile:
    """A file with one JSON object on each line. A line is on disk when it is written, so a run that is killed keeps it.

    Args:
        path: path of the file; its folder is created.
        option: flag and its value, for the error.
        is_continued: whether lines are appended to a file that exists.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, *, option: str, is_continued: bool) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if is_continued else "w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"{option}: {error.strerror}: {path}; choose a place that can be written") from None
        atexit.register(self.close)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._file.closed

    def write(self, entry: dict[str, object]) -> None:
        """Write one line."""
        self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file; idempotent."""
        atexit.unregister(self.close)
        self._file.close()
