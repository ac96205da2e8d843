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
        "if the checkpoint that would be loaded is damaged, load the newest older one that is intact, persistent or "
        "not, and log what was skipped and why. Each is read whole to check it, then again to load it. Without this a "
        "damaged one is rejected",
    )
    keep_checkpoints: int | None = option(
        same("keep_checkpoints"),
        None,
        "after each save keep only this many of the newest intact checkpoints, and delete others; default: keep all",
        "N",
        type=int,
    )

    def check_saved(self) -> None:
        """Reject a number that keeps none."""
        if self.keep_checkpoints is not None and self.keep_checkpoints < 1:
            raise LayoutError(
                f"--vtp-keep-checkpoints {self.keep_checkpoints}; the newest one is always kept; give 1 or more, or "
                "leave it out to keep all"
            )
