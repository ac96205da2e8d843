"""What a boundary between two stages costs with each transport, and which transport a run chooses by itself."""

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


class BoundaryStage(NamedTuple):
    """A stage beside a boundary: its tensor-parallel size, what it costs, its site."""

    tp: int
    work: Work
    site: str


class BoundaryCost(NamedTuple):
    """What it costs to send a tensor over a boundary, and its gradient back.

    Attributes:
        strategy: name of the strategy that sends it.
        link: the slowest link of all replicas.
        num_bytes: effective size of the message: one rank that sent so many bytes alone would take as long.
        forward_s: seconds of collectives in the forward pass, on the sending and on the receiving stage.
        backward_s: seconds of collectives in the backward pass, on the same two stages in the same order.
    """

    strategy: str
    link: Link
    num_bytes: int
    forward_s: tuple[float, float]
    backward_s: tuple[float, float]

    @property
    def both_s(self) -> float:
        """Seconds of both messages, there and back, with their collectives."""
        return 2 * self.link.time_s(self.num_bytes) + sum(self.forward_s) + sum(self.backward_s)


class _Exchange(NamedTuple):
    """What a strategy sends in one direction.

    Attributes:
        largest: share of the tensor that the busiest rank sends or receives.
        total: what all ranks send together, as a share of the tensor.
        before: collective of the sending stage before it sends.
        behind: collective of the receiving stage after it has received.
    """

    largest: float
    total: float
    before: CollectiveKind
    behind: CollectiveKind


@functools.cache
def _exchange(strategy: str, src_tp: int, dst_tp: int, is_sharded: bool) -> _Exchange:
    """Read an exchange from the plan of a strategy.

    >>> _exchange("sliced", 2, 4, False)[:2], _exchange("sliced", 2, 2, False)[:2]
    ((0.5, 1.0), (1.0, 2.0))
    >>> _exchange("rank0", 2, 2, True).before
    <CollectiveKind.GATHER: 'gather'>
    """
    num_rows = src_tp * dst_tp  # which both cut evenly

    def sharding(ranks: range) -> Sharding:
        return sharded((num_rows,), tuple(ranks), dim=0) if is_sharded else replicated((num_rows,), tuple(ranks))

    plan = STRATEGIES[strategy].plan(sharding(range(src_tp)), sharding(range(src_tp, src_tp + dst_tp)))
    sent, got = egress_bytes(plan, 1).values(), ingress_bytes(plan, 1).values()
    return _Exchange(max(*sent, *got) / num_rows, sum(sent) / num_rows, plan.start.kind, plan.finish.kind)


@functools.cache
def _rivals(rules: TransportRules, src_tp: int, dst_tp: int) -> tuple[str, ...]:
    """List the transports that a run chooses between by itself, the simplest first."""
    layout = PipelineLayout.from_sizes((src_tp, dst_tp), world_size=src_tp + dst_tp)
    return *rules.rivals(layout, 0, 1), rules.choose(layout, 0, 1)[0]


def transports(problem: SearchProblem) -> Iterator[str]:
    """Yield the transports to try, that of a run without flags first; for stock Megatron only that one.

    Args:
        problem: the search problem.
    """
    yield problem.rules.transport
    if problem.rules.transport == AUTO and not problem.is_stock:
        yield from (name for name, strategy in STRATEGIES.items() if strategy.help is not None)


def cost_of_boundary(
    problem: SearchProblem,
    split: BatchSplit,
    transport: str,
    stages: tuple[BoundaryStage, BoundaryStage],
    links: Sequence[Link],
) -> BoundaryCost:
    """Give the cost of a boundary.

    Args:
        problem: the search problem.
        split: how the samples of the step are shared out.
        transport: the transport that the run is started with.
        stages: the stage before the boundary, and the one behind it.
        links: the links between the two stages, one of each replica.
    """
    src, dst = stages
    if problem.is_stock:
        names: Sequence[str] = (_RANK_TO_RANK,)
    elif transport != AUTO:
        names = (transport,)
    else:
        sites = () if src.site == dst.site else (src.site, dst.site)
        names = _rivals(replace(problem.rules, sites=sites, tensor_bytes=split.message_bytes), src.tp, dst.tp)
    costs = {name: _cost_by(problem, split, name, src, dst, links) for name in names}
    return costs[clearly_fastest({name: cost.both_s for name, cost in costs.items()})]


def _cost_by(
    problem: SearchProblem,
    split: BatchSplit,
    strategy: str,
    src: BoundaryStage,
    dst: BoundaryStage,
    links: Sequence[Link],
) -> BoundaryCost:
    there = _exchange(strategy, src.tp, dst.tp, problem.rules.is_sharded)
    back = _exchange(strategy, dst.tp, src.tp, problem.rules.is_sharded)

    def num_bytes(link: Link) -> int:
        if link.at_once is None:
            return split.message_bytes
        share = max(max(exchange.largest, exchange.total / link.at_once) for exchange in (there, back))
        return math.ceil(share * split.message_bytes)

    link = max(links, key=lambda link: link.time_s(num_bytes(link)))
    return BoundaryCost(
        strategy=strategy,
        link=link,
        num_bytes=num_bytes(link),
        forward_s=(_together_s(src.work, there.before), _together_s(dst.work, there.behind)),
        backward_s=(_together_s(src.work, back.behind), _together_s(dst.work, back.before)),
    )


def _together_s(work: Work, collective: CollectiveKind) -> float:
    if collective is CollectiveKind.NONE:
        return 0.0
    if collective is CollectiveKind.BROADCAST:
        return work.broadcast_s
    return 2 * work.gather_s if collective is CollectiveKind.SUM else work.gather_s


def least_together_s(
    problem: SearchProblem, src: tuple[int, Work], dst: tuple[int, Work]
) -> tuple[float, float, float, float]:
    """Bound from below the collectives of two stages at a boundary, whichever transport is used.

    Args:
        problem: the search problem.
        src: tensor-parallel size of the stage before, and what it costs.
        dst: tensor-parallel size of the stage behind, and what it costs.

    Returns:
        Seconds of the stage before in its forward and its backward pass, then those of the stage behind.
    """
    transport, is_sharded = problem.rules.transport, problem.rules.is_sharded
    names = STRATEGIES if transport == AUTO else (transport,)
    rows = []
    for name in names:
        there, back = _exchange(name, src[0], dst[0], is_sharded), _exchange(name, dst[0], src[0], is_sharded)
        collectives = ((src[1], there.before), (src[1], back.behind), (dst[1], there.behind), (dst[1], back.before))
        rows.append([_together_s(work, collective) for work, collective in collectives])
    first, second, third, fourth = (min(column) for column in zip(*rows, strict=True))
    return first, second, third, fourth
