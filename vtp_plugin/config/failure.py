"""What a run says, and when it gives up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.declare import declare
from vtp_plugin.errors import LayoutError
from vtp_plugin.ground.flag import FlagGroup, own, same

LogLevelName = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
option = functools.partial(declare, FlagGroup.FAILURE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Options about the log, and about ranks that stop or do not come."""

    timeout_s: float = option(
        same("timeout_s", at_start=True),
        600.0,
        "a rank that does not answer for this long ends the run on all ranks; default 600",
        "SECONDS",
        type=float,
    )
    log_level: LogLevelName = option(
        own("it changes nothing but the log"),
        "INFO",
        "how much the plugin says: DEBUG, INFO (default), WARNING or ERROR. INFO comes from rank 0 and from the first "
        "rank of every other site, DEBUG from all ranks",
        "INFO",
    )

    def check_failure(self) -> None:
        """Refuse a limit that is none."""
        if not 0 < self.timeout_s < float("inf"):
            raise LayoutError(f"timeout of {self.timeout_s} s must be positive and finite; leave it out for 600 s")
