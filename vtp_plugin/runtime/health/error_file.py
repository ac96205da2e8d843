"""The file from which torchrun's summary learns why a rank ended."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from vtp_plugin.util.printable import plain

# Torchrun names the rank with the earliest whole second as the root cause.
_LATER_S = 2


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
