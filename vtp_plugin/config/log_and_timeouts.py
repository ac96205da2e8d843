"""What a run logs, and after which time it gives up."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, given, own, same
from vtp_plugin.config.parse_values import parse_steps
from vtp_plugin.errors import LayoutError

LogLevelName = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
option = functools.partial(declare, FlagGroup.FAILURE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Options about the log, the trace, and ranks that stop or do not come."""

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

    trace: str | None = option(
        given("whether --vtp-trace is given"),
        None,
        "write what each rank does and when into a folder, rank 3 into rank3.jsonl; `trace` joins the files to one "
        "picture of all ranks beside the plan. All ranks give it or none; sites may name different folders",
        "DIR",
    )
    trace_steps: tuple[int, int] = option(
        same("vtp_trace_steps", separator="-"),
        (2, 21),
        "with --vtp-trace: first and last training step that is written, counted from the start of the process; "
        "default 2-21. A step of one rank takes about 100 bytes for each message and each compute",
        "2-21",
        parse=parse_steps,
    )

    timing: bool = option(
        same("vtp_timing"),
        False,
        "at every line of Megatron's log, say what the last step's time went to on each stage: compute, exposed "
        "communication and bubble, with the slowest rank of each; also to Megatron's TensorBoard and W&B. A rank that "
        "computes much longer than the others of its stage is named. With several sites also what crossed between "
        "them, how fast, and how long stages waited for it",
    )

    def check_failure(self) -> None:
        """Refuse a time limit that is not positive."""
        if not 0 < self.timeout_s < float("inf"):
            raise LayoutError(f"timeout of {self.timeout_s} s must be positive and finite; leave it out for 600 s")
