"""How tensors cross between two stages: what each transport costs there, and which one a run takes by itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from vtp_plugin.plan.boundary.boundary_plan import CollectiveKind, egress_bytes, ingress_bytes
from vtp_plugin.plan.boundary.sharding import Sharding, replicated, sharded
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES
from vtp_plugin.plan.boundary.strategies.transport_rules import TransportRules, clearly_fastest
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.tune.cluster.speed import Link
from vtp_plugin.tune.search.problem import BatchSplit, SearchProblem
from vtp_plugin.tune.search.stage_cost import Work

AUTO = "auto"
# Between stages of stock Megatron each rank sends what it has to its peer.
_RANK_TO_RANK = "sliced"


class End(NamedTuple):
    """A stage beside a boundary: its tensor-parallel size, what it costs, its site."""

    tp: int
    work: Work
    site: str


class BoundaryCost(NamedTuple):
    """How a tensor crosses, and its gradient.

    Attributes:
        strategy: its name.
        link: the slowest one of all replicas.
        num_bytes: as many take as long if one rank sends them all.
        forward_s: what the stage before does for it in its forward pass, and the stage behind.
        backward_s: likewise in the backward pass.
    """

    strategy: str
    link: Link
    num_bytes: int
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]

    @property
    def both_s(self) -> float:
        """There and back."""
        return 2 * self.link.time_s(self.num_bytes) + sum(self.forward_s) + sum(self.backward_s)


class _Way(NamedTuple):
    """One exchange.

    Attributes:
        largest: share of the tensor that the busiest rank sends or receives.
        total: of all ranks together.
        before: what ranks of the sending stage do together before it.
        behind: likewise, of the receiving stage behind it.
    """

    largest: float
    total: float
    before: CollectiveKind
    behind: CollectiveKind


@functools.cache
def _way(strategy: str, src_tp: int, dst_tp: int, is_sharded: bool) -> _Way:
    """Read from a plan what an exchange is.

    >>> _way("sliced", 2, 4, False)[:2], _way("sliced", 2, 2, False)[:2], _way("rank0", 2, 2, True).before
    ((0.5, 1.0), (1.0, 2.0), <CollectiveKind.GATHER: 'gather'>)
    """
    num_rows = src_tp * dst_tp  # which both cut evenly

    def sharding(ranks: range) -> Sharding:
        return sharded((num_rows,), tuple(ranks), dim=0) if is_sharded else replicated((num_rows,), tuple(ranks))

    plan = STRATEGIES[strategy].plan(sharding(range(src_tp)), sharding(range(src_tp, src_tp + dst_tp)))
    sent, got = egress_bytes(plan, 1).values(), ingress_bytes(plan, 1).values()
    return _Way(max(*sent, *got) / num_rows, sum(sent) / num_rows, plan.start.kind, plan.finish.kind)


@functools.cache
def _tried(rules: TransportRules, src_tp: int, dst_tp: int) -> tuple[str, ...]:
    """List what a run may take, the simplest first."""
    layout = PipelineLayout.from_sizes((src_tp, dst_tp), world_size=src_tp + dst_tp)
    return *rules.rivals(layout, 0, 1), rules.choose(layout, 0, 1)[0]


def transports(question: SearchProblem) -> Iterator[str]:
    """Yield what may be asked for, what a run does by itself first; of stock Megatron nothing else.

    Args:
        question: what is asked.
    """
    yield question.rules.transport
    if question.rules.transport == AUTO and not question.is_stock:
        yield from (name for name, strategy in STRATEGIES.items() if strategy.help is not None)


def cross(
    question: SearchProblem,
    shape: BatchSplit,
    transport: str,
    ends: tuple[End, End],
    links: Sequence[Link],
) -> BoundaryCost:
    """Give what a boundary costs.

    Args:
        question: what is asked.
        shape: of the step.
        transport: that is asked for.
        ends: the stage before, and the one behind.
        links: between them, of all replicas.
    """
    src, dst = ends
    if question.is_stock:
        names: Sequence[str] = (_RANK_TO_RANK,)
    elif transport != AUTO:
        names = (transport,)
    else:
        sites = () if src.site == dst.site else (src.site, dst.site)
        names = _tried(replace(question.rules, sites=sites, tensor_bytes=shape.message_bytes), src.tp, dst.tp)
    found = {name: _by(question, shape, name, src, dst, links) for name in names}
    return found[clearly_fastest({name: one.both_s for name, one in found.items()})]


def _by(
    question: SearchProblem, shape: BatchSplit, strategy: str, src: End, dst: End, links: Sequence[Link]
) -> BoundaryCost:
    there = _way(strategy, src.tp, dst.tp, question.rules.is_sharded)
    back = _way(strategy, dst.tp, src.tp, question.rules.is_sharded)

    def num_bytes(link: Link) -> int:
        if link.at_once is None:
            return shape.message_bytes
        share = max(max(way.largest, way.total / link.at_once) for way in (there, back))
        return math.ceil(share * shape.message_bytes)

    link = max(links, key=lambda link: link.time_s(num_bytes(link)))
    return BoundaryCost(
        strategy=strategy,
        link=link,
        num_bytes=num_bytes(link),
        forward_s=(_together_s(src.work, there.before), _together_s(dst.work, there.behind)),
        backward_s=(_together_s(src.work, back.behind), _together_s(dst.work, back.before)),
    )


def _together_s(work: Work, kind: CollectiveKind) -> float:
    if kind is CollectiveKind.NONE:
        return 0.0
    if kind is CollectiveKind.BROADCAST:
        return work.broadcast_s
    return 2 * work.gather_s if kind is CollectiveKind.SUM else work.gather_s


def least_together_s(
    question: SearchProblem, src: tuple[int, Work], dst: tuple[int, Work]
) -> tuple[float, float, float, float]:
    """Bound what two stages do for a boundary, whichever transport carries it.

    Args:
        question: what is asked.
        src: size of the stage before, and what it costs.
        dst: likewise of the one behind.

    Returns:
        Of the stage before in its forward and its backward pass, and of the one behind.
    """
    transport, is_sharded = question.rules.transport, question.rules.is_sharded
    names = STRATEGIES if transport == AUTO else (transport,)
    rows = []
    for name in names:
        there, back = _way(name, src[0], dst[0], is_sharded), _way(name, dst[0], src[0], is_sharded)
        kinds = ((src[1], there.before), (src[1], back.behind), (dst[1], there.behind), (dst[1], back.before))
        rows.append([_together_s(work, kind) for work, kind in kinds])
    first, second, third, fourth = (min(column) for column in zip(*rows, strict=True))
    return first, second, third, fourth
