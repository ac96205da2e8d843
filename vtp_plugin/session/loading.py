"""What is known of a checkpoint while it is being loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vtp_plugin.checkpoint.format.index import INDEX, read_index

if TYPE_CHECKING:
    from vtp_plugin.checkpoint.format.entries import Extent
    from vtp_plugin.checkpoint.load.stored_optimizer import StoredOptimizer

_BY_BUCKET: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*")
# Keys that only the layout that stored them can read. Megatron does not ask for the state of a repeated step where no
# step was being repeated.
_OF_ONE_LAYOUT: Final = ("rng_state", "rerun_state_machine_state")


class Loading:
    """What is known of a checkpoint that is being loaded, kept from one part of the load for the next.

    Attributes:
        stored_optimizer: the checkpoint's optimizer, if it is read into another layout; None otherwise.
        is_moved: whether stages are unequal, or another layout has saved the checkpoint.
    """

    def __init__(self) -> None:
        self.stored_optimizer: StoredOptimizer | None = None
        self.is_moved = False
        self._objects: tuple[tuple[int, int, int, int], Mapping[str, Extent]] | None = None

    def objects_of(self, checkpoint: Path, require: Callable[[Mapping[str, Extent]], None]) -> Mapping[str, Extent]:
        """Return where the objects of a checkpoint lie, by key; the index is read once for each load.

        Args:
            checkpoint: folder of a checkpoint that has an index.
            require: checks the objects when the index is read.

        Raises:
            UntrustedError: the index names an object that a checkpoint must not hold.
            ConfigError: the index is damaged.
        """
        found = (checkpoint / INDEX).stat()
        known = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        if self._objects is None or self._objects[0] != known:
            objects = read_index(checkpoint).objects
            require(objects)
            self._objects = known, objects
        return self._objects[1]

    def keep(self, stored: StoredOptimizer | None) -> None:
        """Keep a stored optimizer for later parts of the load, or drop it."""
        self.stored_optimizer = stored

    def note_move(self, is_moved: bool) -> None:
        """Note whether stages are unequal, or another layout has saved the checkpoint."""
        self.is_moved = is_moved

    def missing(self, keys: Iterable[str]) -> set[str]:
        """Return the stored keys that a load really leaves out.

        Args:
            keys: stored keys for which no rank asks Megatron.
        """
        if not self.is_moved:
            return {*keys}
        left = {key for key in keys if key not in _OF_ONE_LAYOUT}
        # The plugin reads the optimizer itself.
        return left if self.stored_optimizer is None else {key for key in left if not _BY_BUCKET.fullmatch(key)}
