"""Laws of boundaries whose replicas hold different samples of a batch, against a delivery with real arrays."""

from __future__ import annotations

import math

from hypothesis import assume, given
from hypothesis import strategies as st

from tests.property.test_boundary_properties import DOWNSTREAM, SETTINGS, Exchange, deliver, legal_step, stage
from tests.support.plans import reversed_plan
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, egress_bytes, ingress_bytes
from vtp_plugin.plan.boundary.check_boundary import check
from vtp_plugin.plan.boundary.endpoint import Endpoint
from vtp_plugin.plan.boundary.strategies.known_strategies import STRATEGIES


@st.composite
def split_exchanges(draw: st.DrawFn) -> Exchange:
    """Sides of 1 to 4 replicas, each with its own sizes, and a batch that divides for both."""
    endpoints: list[tuple[Endpoint, bool]] = []
    steps: list[int] = []
    for first in (0, DOWNSTREAM):
        tp, cp, is_sharded = draw(st.integers(1, 6)), draw(st.sampled_from([1, 1, 2])), draw(st.booleans())
        num_replicas = draw(st.integers(1, 4))
        rows = stage(tp, cp * num_replicas, first).ranks_by_cp
        endpoints.append((Endpoint(ranks_by_cp=rows, num_replicas=num_replicas), is_sharded))
        steps.append(legal_step(tp, cp, is_sharded=is_sharded))
    (src, src_sharded), (dst, dst_sharded) = endpoints
    batch = math.lcm(src.num_replicas, dst.num_replicas) * draw(st.integers(1, 2))
    return Exchange(
        src=src,
        dst=dst,
        src_sharded=src_sharded,
        dst_sharded=dst_sharded,
        shape=(math.lcm(*steps) * draw(st.integers(1, 3)), batch, draw(st.integers(1, 2))),
    )


def joined_leaders(exchange: Exchange) -> list[tuple[int, int]]:
    """Pair the leaders of the replicas that have samples in common, restated with fractions of the batch."""
    a, b = exchange.src.num_replicas, exchange.dst.num_replicas
    pairs = [(i, j) for j in range(b) for i in range(a) if i * b < (j + 1) * a and j * a < (i + 1) * b]
    leaders = [endpoint.ranks_by_cp[:: endpoint.cp] for endpoint in (exchange.src, exchange.dst)]
    return [(leaders[0][i][0], leaders[1][j][0]) for i, j in pairs]


def plan_of(exchange: Exchange, strategy: str) -> BoundaryPlan:
    assume(strategy == "sliced" or exchange.src.cp == exchange.dst.cp == 1)
    return exchange.plan(strategy)


@SETTINGS
@given(split_exchanges(), st.sampled_from(sorted(STRATEGIES)))
def test_every_replica_gets_its_samples_exactly_once(exchange: Exchange, strategy: str) -> None:
    plan = plan_of(exchange, strategy)
    assert check(plan) == ()
    deliver(plan)
    back = reversed_plan(plan)
    assert check(back) == ()
    deliver(back)
    assert reversed_plan(back) == plan
    header = exchange.spec(strategy).plan_header(4)
    assert check(header) == ()
    deliver(header)


@SETTINGS
@given(split_exchanges())
def test_leaders_carry_what_two_replicas_have_in_common(exchange: Exchange) -> None:
    plan = plan_of(exchange, "rank0")
    assert [(t.src, t.dst) for t in plan.transfers] == joined_leaders(exchange)
    assert sum(t.num_elements for t in plan.transfers) == math.prod(exchange.shape)
    # What several ranks of a replica do together stays inside it.
    groups = [(plan.start.groups, exchange.src), (plan.finish.groups, exchange.dst)]
    assert all(set(found) <= set(endpoint.ranks_by_cp) for found, endpoint in groups)


@SETTINGS
@given(split_exchanges())
def test_slices_give_every_rank_at_most_its_share(exchange: Exchange) -> None:
    plan = plan_of(exchange, "sliced")
    for endpoint, elements in ((exchange.src, egress_bytes(plan, 1)), (exchange.dst, ingress_bytes(plan, 1))):
        length, batch, width = exchange.shape
        tp = len(endpoint.ranks_by_cp[0])
        is_paired = [h.boxes for h in plan.src.holdings] == [h.boxes for h in plan.dst.holdings]
        rows = length // endpoint.cp if is_paired else -(-length // endpoint.cp // tp)
        assert max(elements.values()) <= rows * (batch // endpoint.num_replicas) * width


@SETTINGS
@given(split_exchanges())
def test_local_shape_is_what_a_rank_holds(exchange: Exchange) -> None:
    for endpoint, is_sharded in ((exchange.src, exchange.src_sharded), (exchange.dst, exchange.dst_sharded)):
        sharding = endpoint.sharding(exchange.shape, is_sharded=is_sharded)
        local = endpoint.local_shape(exchange.shape, is_sharded=is_sharded)
        assert {holding.local_shape for holding in sharding.holdings} == {local}
        assert endpoint.whole_shape(local, is_sharded=is_sharded) == exchange.shape


@SETTINGS
@given(split_exchanges())
def test_plans_keep_to_the_links_that_are_warmed_up(exchange: Exchange) -> None:
    spec = exchange.spec("sliced")
    warm = {(t.src, t.dst) for t in spec.probe.transfers}
    assert {(t.src, t.dst) for t in exchange.plan("sliced").transfers} <= warm
