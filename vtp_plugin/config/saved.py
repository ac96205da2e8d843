"""Which checkpoints stay, and which one is loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, same
from vtp_plugin.errors import LayoutError

option = functools.partial(declare, FlagGroup.SAVED)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Options about checkpoints."""

    load_newest_valid: bool = option(
        same("load_newest_valid"),
        False,
        "if the checkpoint in --load is broken, load the newest one before it that is not, and say what was passed "
        "over and why; all of it is read first, and once more to load it. Without this a broken one is refused",
    )
    keep_checkpoints: int | None = option(
        same("keep_checkpoints"),
        None,
        "when a checkpoint is saved, remove all but this many of the newest that are whole; default: keep all",
        "N",
        type=int,
    )

    def check_saved(self) -> None:
        """Refuse to keep none."""
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise LayoutError(
                f"keep checkpoints {self.keep_checkpoints}; the newest one is always kept; give 1 or more, or leave it "
                "out to keep all"
            )
