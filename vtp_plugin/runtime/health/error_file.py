"""The file from which torchrun's summary learns why a rank ended."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from vtp_plugin.util.printable import plain

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
