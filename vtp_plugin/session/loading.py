"""What is known of a checkpoint while it is being loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vtp_plugin.checkpoint.format.checkpoint_files import way_out
from vtp_plugin.checkpoint.format.index import INDEX, Index, read_index
from vtp_plugin.checkpoint.load.stored_optimizer import Rates

if TYPE_CHECKING:
    from vtp_plugin.checkpoint.format.index import Extent
    from vtp_plugin.checkpoint.format.resolver import Asked
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
        asked: where the run looks for it; None before the first load.
        rates: whose rates the run has from then on.
    """

    def __init__(self) -> None:
        self.stored_optimizer: StoredOptimizer | None = None
        self.asked: Asked | None = None
        self.is_moved = False
        self.rates = Rates.SAME
        self._known: tuple[int, int, int, int] | None = None
        self._objects: Mapping[str, Extent] = {}
        self._index: Index | None = None

    def begin(self, asked: Asked) -> Asked:
        """Note where the run looks for a checkpoint, and return it."""
        self.asked = asked
        return asked

    def way_out(self, checkpoint: Path) -> str:
        """Say what to do about a checkpoint that cannot be loaded."""
        return way_out(checkpoint, self.asked)

    def objects_of(self, checkpoint: Path, require: Callable[[Mapping[str, Extent]], None]) -> Mapping[str, Extent]:
        """Return where the objects of a checkpoint lie, by key; the index is read once for each load.

        Args:
            checkpoint: folder of a checkpoint that has an index.
            require: checks the objects when the index is read.

        Raises:
            UntrustedError: the index names an object that a checkpoint must not hold.
            ConfigError: the index is damaged.
        """
        if self._known != (found := _identity(checkpoint)):
            self._read(checkpoint, found, require)
        return self._objects

    def index_of(self, checkpoint: Path, require: Callable[[Mapping[str, Extent]], None]) -> Index:
        """Return the index of a checkpoint; arguments and errors are those of :meth:`objects_of`."""
        if self._known == (found := _identity(checkpoint)) and self._index is not None:
            return self._index
        return self._read(checkpoint, found, require)

    def _read(
        self, checkpoint: Path, known: tuple[int, int, int, int], require: Callable[[Mapping[str, Extent]], None]
    ) -> Index:
        index = read_index(checkpoint)
        require(index.objects)
        self._known, self._objects, self._index = known, index.objects, index
        return index

    def drop_index(self) -> None:
        """Let go of what the index says of tensors, when no part of this load asks for it any more."""
        self._index = None

    def keep(self, stored: StoredOptimizer | None) -> None:
        """Keep a stored optimizer for later parts of the load, or drop it."""
        self.stored_optimizer = stored

    def note_move(self, is_moved: bool) -> None:
        """Note whether stages are unequal, or another layout has saved the checkpoint."""
        self.is_moved = is_moved

    def note_rates(self, rates: Rates) -> None:
        """Note whose rates the run has."""
        self.rates = rates

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


def _identity(checkpoint: Path) -> tuple[int, int, int, int]:
    """Return what tells the index of a checkpoint from others, and from itself when it is rewritten."""
    found = (checkpoint / INDEX).stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
