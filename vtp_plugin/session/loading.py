"""What is known of a checkpoint while it is being loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vtp_plugin.checkpoint.index import read_named

if TYPE_CHECKING:
    from vtp_plugin.runtime.stored_optimizer import StoredOptimizer


class Loading:
    """Keeps what one part of loading has found for the parts that come later.

    Attributes:
        stored_optimizer: what the checkpoint holds, if it is read into another layout; None otherwise.
    """

    def __init__(self) -> None:
        self.stored_optimizer: StoredOptimizer | None = None
        self._plain: set[tuple[int, int, int, int]] = set()

    def require_plain_index(self, file: Path, require_more: Callable[[], None]) -> None:
        """Refuse an index of a checkpoint that names what it must not, before torch loads it; each is read once.

        Args:
            file: the index.
            require_more: what is to be looked at together with it.

        Raises:
            UntrustedError: it does.
            ConfigError: it is damaged.
        """
        found = file.stat()
        known = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if known not in self._plain:
            read_named(file)
            require_more()
            self._plain.add(known)

    def keep(self, stored: StoredOptimizer | None) -> None:
        """Keep a stored optimizer for those that want something of it, or let it go."""
        self.stored_optimizer = stored
