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
from vtp_plugin.tune.cluster.speed import Link, Speed
from vtp_plugin.tune.search.problem import SearchProblem, StageType
from vtp_plugin.tune.search.search_space import SearchSpace

AUTO = "auto"
# Between stages of stock Megatron each rank sends what it has to its peer.
_RANK_TO_RANK = "sliced"


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
    space: SearchSpace, transport: str, stages: tuple[StageType, StageType], links: Sequence[Link]
) -> BoundaryCost:
    """Give the cost of a boundary.

    Args:
        space: the search space.
        transport: the transport that the run is started with.
        stages: type of the stage before the boundary, and of the one behind it.
        links: the links between the two stages, one of each replica.
    """
    src, dst = stages
    if space.problem.is_stock:
        names: Sequence[str] = (_RANK_TO_RANK,)
    elif transport != AUTO:
        names = (transport,)
    else:
        both = (space.site(src), space.site(dst))
        sites = () if both[0] == both[1] else both
        rules = replace(space.problem.rules, sites=sites, tensor_bytes=space.split.message_bytes)
        names = _rivals(rules, src.tp, dst.tp)
    costs = {name: _cost_by(space, name, src, dst, links) for name in names}
    return costs[clearly_fastest({name: cost.both_s for name, cost in costs.items()})]


def _cost_by(space: SearchSpace, strategy: str, src: StageType, dst: StageType, links: Sequence[Link]) -> BoundaryCost:
    both, message_bytes = _exchanges(space, strategy, src, dst), space.split.message_bytes

    def num_bytes(link: Link) -> int:
        if link.at_once is None:
            return message_bytes
        share = max(max(exchange.largest, exchange.total / link.at_once) for exchange in both)
        return math.ceil(share * message_bytes)

    link = max(links, key=lambda link: link.time_s(num_bytes(link)))
    src_forward_s, src_backward_s, dst_forward_s, dst_backward_s = _together_s(space, strategy, src, dst)
    return BoundaryCost(
        strategy=strategy,
        link=link,
        num_bytes=num_bytes(link),
        forward_s=(src_forward_s, dst_forward_s),
        backward_s=(src_backward_s, dst_backward_s),
    )


def _exchanges(space: SearchSpace, strategy: str, src: StageType, dst: StageType) -> tuple[_Exchange, _Exchange]:
    """Give what a strategy sends there, and back."""
    is_sharded = space.problem.rules.is_sharded
    return _exchange(strategy, src.tp, dst.tp, is_sharded), _exchange(strategy, dst.tp, src.tp, is_sharded)


def _together_s(space: SearchSpace, strategy: str, src: StageType, dst: StageType) -> tuple[float, float, float, float]:
    """Give the seconds of collectives: of the stage before, forward and backward, then of the stage behind."""
    there, back = _exchanges(space, strategy, src, dst)
    one, other = space.speeds[src], space.speeds[dst]
    return (
        _collective_s(one, there.before),
        _collective_s(one, back.behind),
        _collective_s(other, there.behind),
        _collective_s(other, back.before),
    )


def _collective_s(speed: Speed, collective: CollectiveKind) -> float:
    if collective is CollectiveKind.NONE:
        return 0.0
    if collective is CollectiveKind.BROADCAST:
        return speed.broadcast_s
    return 2 * speed.gather_s if collective is CollectiveKind.SUM else speed.gather_s


def least_together_s(space: SearchSpace, src: StageType, dst: StageType) -> tuple[float, float, float, float]:
    """Bound from below the collectives of two stages at a boundary, whichever transport is used.

    Args:
        space: the search space.
        src: type of the stage before.
        dst: type of the stage behind.

    Returns:
        Seconds of the stage before in its forward and its backward pass, then those of the stage behind.
    """
    transport = space.problem.rules.transport
    names = STRATEGIES if transport == AUTO else (transport,)
    rows = [_together_s(space, name, src, dst) for name in names]
    first, second, third, fourth = (min(column) for column in zip(*rows, strict=True))
    return first, second, third, fourth
