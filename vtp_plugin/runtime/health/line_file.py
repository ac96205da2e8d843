"""A file of one rank that grows line by line."""

from __future__ import annotations

import atexit
import json
from pathlib import Path

from vtp_plugin.errors import ConfigError


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
