"""Replicas of a stage that meet inside a compute, in planned orders: no order makes them wait in a circle.

They meet where experts lie on several of them, where weights are gathered in the first forward, and where the loss
function sums over them. The layouts are those that hung before the orders knew of it.
"""

from __future__ import annotations

import pytest

from tests.multiproc.cases.core_cases import OVERLAPPED, Case, Runs
from tests.multiproc.cases.u_shape_cases import Saved, check_u_shape, u_shaped
from tests.multiproc.experts.test_experts import mixing
from tests.multiproc.training.test_parity import check_parity
from tests.support.hosts import host_name
from tests.support.pool import PoolError


@pytest.mark.needs("experts")
@pytest.mark.parametrize(
    ("dp_list", "ep_list", "num_microbatches"),
    [((1, 2), (1, 2), 6), ((2, 1), (2, 1), 3)],
    ids=["wide cloud", "wide edge"],
)
def test_experts_on_several_replicas_in_a_u(
    runs: Runs, dp_list: tuple[int, ...], ep_list: tuple[int, ...], num_microbatches: int
) -> None:
    check_parity(
        runs,
        mixing(
            "balanced",
            *(1, 1),
            layers=(1, 2, 1),
            dp_list=dp_list,
            ep_list=ep_list,
            etp=1,
            num_microbatches=num_microbatches,
        ),
    )


def test_weights_are_gathered_before_the_first_forward_of_a_u(runs: Runs, saved: Saved) -> None:
    """One edge, four replicas of the cloud, twelve microbatches."""
    check_u_shape(runs, saved, u_shaped(1, 1, dp_list=(1, 4), num_microbatches=12, **OVERLAPPED))


@pytest.mark.skipif(host_name() == "0.12", reason="the loss functions of its scripts need more: refused, see below")
def test_one_microbatch_in_flight(runs: Runs) -> None:
    """The second replica's first forward comes after the first one's first backward."""
    check_parity(runs, Case.of(sizes=(1, 1), dp_list=(1, 2), num_microbatches=3, in_flight=(1, 1), **OVERLAPPED))


@pytest.mark.needs("loss_summed_over_replicas")
def test_a_loss_function_that_sums_over_replicas(runs: Runs, saved: Saved) -> None:
    """On the edge of a U, whose two replicas would reach their losses in other orders."""
    check_u_shape(runs, saved, u_shaped(1, 1, dp_list=(2, 1), num_microbatches=3, sums_loss=True))


@pytest.mark.needs("loss_summed_over_replicas")
def test_a_sum_in_the_loss_needs_room(runs: Runs) -> None:
    """One microbatch in flight cannot reach two replicas that wait for each other in the loss function."""
    case = Case.of(sizes=(1, 1), dp_list=(1, 2), num_microbatches=3, in_flight=(1, 1), sums_loss=True)
    with pytest.raises(PoolError, match=r"--vtp-in-flight 1,1: replicas of a stage wait .*; give 3,1 or"):
        runs.run(case)
