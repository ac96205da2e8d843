"""How tensors get from stage to stage."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from vtp_plugin.config.declare_field import declare
from vtp_plugin.config.flag import FlagGroup, same
from vtp_plugin.config.parse_values import parse_bridges, parse_bytes
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES

TransportName = str
"""`"auto"`, or the name of a strategy that users are offered."""
DpModeName = Literal["multiplex", "split"]
option = functools.partial(declare, FlagGroup.WHAT)
_OFFERED = {name: strategy.help for name, strategy in STRATEGIES.items() if strategy.help is not None}


@dataclass(frozen=True, kw_only=True)
class TransportFields:
    """Options about what crosses boundaries and bridges."""

    transport: TransportName = option(
        same("transport"),
        "auto",
        f"how tensors cross between stages: {', '.join(map(' '.join, _OFFERED.items()))}; auto (default) takes rank0 "
        "between sites and for small tensors; for others a run tries what there is at its start and takes the fastest",
        choices=("auto", *_OFFERED),
    )
    transport_threshold_bytes: int | None = option(
        same("vtp_transport_threshold"),
        None,
        "with --vtp-transport auto: tensors of this size and more cross in slices if there is a choice, smaller ones "
        "by rank0, and the run tries nothing; bytes, or a number with KiB or MiB",
        "4MiB",
        name="--vtp-transport-threshold",
        parse=parse_bytes,
    )
    dp_mode: DpModeName = option(
        same("dp mode"),
        "multiplex",
        "how stages of different data-parallel sizes work together: multiplex (default) lets a narrow stage run its "
        "microbatches in turn for each replica of a wide one; split lets it run larger microbatches, and each replica "
        "of the wide one gets a part (--micro-batch-size then holds for the widest stage)",
    )
    bridges: bool | Literal["extended"] = option(
        same("vtp_bridges", at_start=True),
        False,
        "use the plugin's bridges between modules (MIMO) instead of Megatron's, also without --vtp-size-list; "
        "'extended' also lets the colocated one do what Megatron's does not support",
        "extended",
        **{"nargs": "?", "const": True, "parse": parse_bridges},
    )

    def check_transport(self) -> None:
        """Reject a threshold for a transport that has none."""
        if self.transport_threshold_bytes is not None and self.transport != "auto":
            raise LayoutError(
                f"--vtp-transport-threshold {self.transport_threshold_bytes} with --vtp-transport {self.transport}; it "
                "is used by auto only; leave one of them out"
            )
