"""What a strategy is, the table of them, and which one carries a boundary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan
from vtp_plugin.plan.boundary.endpoint import Sharding
from vtp_plugin.plan.boundary.strategies.leaders import plan_rank0, promise_leaders
from vtp_plugin.plan.boundary.strategies.slices import plan_divided, plan_sliced, promise_divided, promise_sliced
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.util.text import in_digits

Planner = Callable[[Sharding, Sharding], BoundaryPlan]
"""Makes the plan from the upstream to the downstream sharding; equal arguments give equal plans on every rank."""

Promise = Callable[[BoundaryPlan], Iterator[str]]
"""Yields a line for everything in a plan that its links may not carry."""


IsTried = Callable[[int, int, bool], bool]
"""Tells whether a run tries a strategy between two stages of one site and one context-parallel size, by their
tensor-parallel sizes and whether ranks of a stage hold copies."""


def never(_src_tp: int, _dst_tp: int, _has_copies: bool) -> bool:
    """Tell that a run tries the strategy only where it is asked for."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to cross a boundary.

    Attributes:
        name: Name of the strategy, as a user writes it and as its plans carry it.
        plan: Makes a plan from two shardings.
        promise: Yields a line for all that the links of a plan may not carry;
            :mod:`vtp_plugin.plan.boundary.check_boundary` holds every plan to it.
        has_leaders: Whether only leaders talk. Headers then go the same way, and it cannot join stages of different
            context-parallel sizes.
        help: Text for the help of `--vtp-transport`; None if users are not offered the strategy.
        is_tried: Tells whether a run tries it at its start between two stages, if nothing else decides.
    """

    name: str
    plan: Planner
    promise: Promise
    has_leaders: bool = False
    help: str | None = None
    is_tried: IsTried = never


_ROWS = (
    Strategy(
        name="rank0",
        plan=plan_rank0,
        promise=promise_leaders,
        has_leaders=True,
        help="goes through one rank of each stage",
        is_tried=lambda src_tp, dst_tp, _: src_tp != dst_tp,
    ),
    Strategy(
        name="sliced",
        plan=plan_sliced,
        promise=promise_sliced,
        help="gives every link its share",
        is_tried=lambda *_: True,
    ),
    Strategy(
        name="divided",
        plan=plan_divided,
        promise=promise_divided,
        help="cuts also between stages of one size",
        # With one rank each, or with slices, there is nothing to cut.
        is_tried=lambda src_tp, dst_tp, has_copies: src_tp == dst_tp and has_copies,
    ),
)
STRATEGIES: Mapping[str, Strategy] = MappingProxyType({row.name: row for row in _ROWS})
"""By name, the simplest first: where a run tries several, each needs only ranks and groups that the last one has.

A plan carries the name of the strategy that made it.
"""


SLICED_FROM_BYTES = 256 * 1024
"""Below this size the leaders were faster on every network that `benchmarks/boundary.py` measured."""


# Another strategy must take less than this share of a simpler one's time to be worth its messages: times that are
# closer differ by chance.
_MOST_OF_SIMPLER = 0.9


def clearly_fastest(times: Mapping[str, float]) -> str:
    """Choose the simplest strategy, with fewest messages, unless another is clearly faster.

    Args:
        times: time of an exchange by strategy, the simplest first; any unit.

    >>> clearly_fastest({"rank0": 1.0, "sliced": 0.95}), clearly_fastest({"rank0": 1.0, "sliced": 0.5})
    ('rank0', 'sliced')
    """
    simplest, fastest = next(iter(times)), min(times, key=lambda name: times[name])
    return fastest if times[fastest] < _MOST_OF_SIMPLER * times[simplest] else simplest


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRules:
    """What decides how a boundary is crossed.

    Attributes:
        transport: `"auto"`, or the name of a strategy, such as `"rank0"` or `"sliced"`.
        sites: Site of every stage; empty for one site.
        tensor_bytes: Size of the tensor that crosses between stages of the largest context- and data-parallel size;
            None if it is not known beforehand.
        threshold_bytes: Size from which on tensors cross in slices if there is a choice; None if no option gave it.
        is_sharded: Whether ranks hold slices of activations (sequence parallelism), so that each sends only its part.
        is_split: Whether replicas of a wide stage share the samples of a narrow one's microbatch.
    """

    transport: str = "auto"
    sites: tuple[str, ...] = ()
    tensor_bytes: int | None = None
    threshold_bytes: int | None = None
    is_sharded: bool = False
    is_split: bool = False

    def rivals(self, layout: PipelineLayout, upstream: int, downstream: int) -> tuple[str, ...]:
        """List the strategies that a run tries at its start beside the one that `choose` gives, to take the fastest.

        They use the ranks and groups of the chosen one, and no others.

        >>> layout = PipelineLayout.from_sizes((1, 4, 4), world_size=9)
        >>> [TransportRules(tensor_bytes=1 << 20).rivals(layout, v, v + 1) for v in range(2)]
        [('rank0',), ('sliced',)]
        """
        return self._tried(layout, upstream, downstream)[:-1]

    def _tried(self, layout: PipelineLayout, upstream: int, downstream: int) -> tuple[str, ...]:
        """List what a run tries at its start, the simplest first; nothing where the choice is already made."""
        src, dst = layout.stages[upstream], layout.stages[downstream]
        is_large = self.tensor_bytes is not None and self.tensor_bytes >= SLICED_FROM_BYTES
        is_open = self.transport == "auto" and self.threshold_bytes is None and src.cp == dst.cp and is_large
        if not is_open or self._crosses_sites(upstream, downstream):
            return ()
        # Between equal stages cutting saves something only where ranks hold copies.
        has_copies = src.tp > 1 and not self.is_sharded and (src.dp == dst.dp or not self.is_split)
        return tuple(name for name, one in STRATEGIES.items() if one.is_tried(src.tp, dst.tp, has_copies))

    def choose(self, layout: PipelineLayout, upstream: int, downstream: int) -> tuple[str, str]:
        """Choose the strategy of a boundary, with the reason for the log; the same on every rank.

        Raises:
            ConfigError: The context-parallel sizes differ, and the leaders were asked to carry it alone.

        >>> layout = PipelineLayout.from_sizes((1, 4, 4), world_size=9)
        >>> TransportRules(sites=("edge", "cloud", "cloud")).choose(layout, 0, 1)
        ('rank0', 'crosses from site edge to site cloud')
        >>> TransportRules().choose(layout, 1, 2)
        ('sliced', 'both stages have the same size: rank to rank')
        """
        src, dst = layout.stages[upstream], layout.stages[downstream]
        crosses_sites = self._crosses_sites(upstream, downstream)
        has_leaders = crosses_sites if self.transport == "auto" else STRATEGIES[self.transport].has_leaders
        if src.cp != dst.cp and has_leaders:
            obstacle = "it crosses sites" if self.transport == "auto" else f"--vtp-transport is {self.transport}"
            raise LayoutError(
                f"boundary {upstream}->{downstream} joins context-parallel sizes {src.cp} and {dst.cp}, and "
                f"{obstacle}; different sizes need the transport sliced, where every rank sends; use --vtp-transport "
                "sliced, or equal sizes"
            )
        if self.transport != "auto":
            return self.transport, "asked for"
        if src.cp != dst.cp:
            return "sliced", "context-parallel sizes differ"
        if crosses_sites:
            return "rank0", f"crosses from site {self.sites[upstream]} to site {self.sites[downstream]}"
        *rivals, last = self._tried(layout, upstream, downstream) or ("sliced",)
        if src.tp == dst.tp:
            if rivals:
                said = " and ".join("rank to rank (sliced)" if name == "sliced" else name for name in rivals)
                return last, f"both stages have the same size; a run tries {said} as well at its start"
            return last, "both stages have the same size: rank to rank"
        limit_bytes = SLICED_FROM_BYTES if self.threshold_bytes is None else self.threshold_bytes
        if self.tensor_bytes is not None and self.tensor_bytes < limit_bytes:
            said = "slices pay off" if self.threshold_bytes is None else "--vtp-transport-threshold allows slices"
            return "rank0", f"tensors of {_shown(self.tensor_bytes)}; {said} from {_shown(limit_bytes)} on"
        if rivals:
            said, best = " and ".join(rivals), "faster" if len(rivals) == 1 else "fastest"
            return last, f"the stages' sizes differ; a run tries {said} as well at its start and takes the {best} one"
        return last, "the stages' sizes differ: every link carries its share"

    def _crosses_sites(self, upstream: int, downstream: int) -> bool:
        return bool(self.sites) and self.sites[upstream] != self.sites[downstream]


def _shown(num_bytes: int) -> str:
    """Write a number of bytes.

    >>> _shown(999), _shown(32768), _shown(16 << 20)
    ('999 bytes', '32 KiB', '16384 KiB')
    """
    return f"{num_bytes} bytes" if num_bytes % 1024 and num_bytes < 10240 else f"{in_digits(num_bytes / 1024, 6)} KiB"
