"""What is known of a checkpoint while it is being loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vtp_plugin.checkpoint.index import read_named

if TYPE_CHECKING:
    from vtp_plugin.runtime.stored_optimizer import StoredOptimizer

_BY_BUCKET: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*")
# What only the layout that stored it can take; if it asks for it, nobody misses it. Megatron does not ask for the state
# of a repeated step where none was being repeated.
_OF_ONE_LAYOUT: Final = ("rng_state", "rerun_state_machine_state")


class Loading:
    """Keeps what one part of loading has found for the parts that come later.

    Attributes:
        stored_optimizer: what the checkpoint holds, if it is read into another layout; None otherwise.
        is_moved: whether stages are unequal, or another layout has saved what is being loaded.
    """

    def __init__(self) -> None:
        self.stored_optimizer: StoredOptimizer | None = None
        self.is_moved = False
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

    def note_move(self, is_moved: bool) -> None:
        """Note whether stages are unequal, or another layout has saved what is being loaded."""
        self.is_moved = is_moved

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Return those of the stored keys for which no rank asks that a load really leaves out.

        Args:
            keys: that are stored, and for which no rank asks Megatron.
        """
        if not self.is_moved:
            return {*keys}
        left = {key for key in keys if key not in _OF_ONE_LAYOUT}
        # It is read by us.
        return left if self.stored_optimizer is None else {key for key in left if not _BY_BUCKET.fullmatch(key)}
