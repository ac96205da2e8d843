"""What a worker keeps when it is fullest, against a look at every moment of random orders."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.expected.schedule_oracle import kept, random_schedule
from vtp_plugin.plan.layout.layer_lists import Kept
from vtp_plugin.plan.schedule.make.u_shape import interleaved_one_f_one_b
from vtp_plugin.plan.schedule.order.actions import Action, Actions, Op
from vtp_plugin.plan.schedule.order.placement import interleaved_placement, plain_placement, u_placement
from vtp_plugin.plan.schedule.proof.check_schedule import most_activations, peaks_kept

PLACEMENTS = (
    plain_placement(3),
    plain_placement(2, num_replicas=(1, 3)),
    interleaved_placement(2, 3),
    u_placement(3),
    u_placement(2, num_rings=2, num_replicas=(1, 2)),
)


def split_at_random(order: Actions, chance: random.Random) -> Actions:
    """Compute the gradients of some weights apart, any time later."""
    found: list[Action] = []
    for action in reversed(order):
        is_split = action.op is Op.B and chance.random() < 0.7
        if is_split:
            found.insert(chance.randint(0, len(found)), replace(action, op=Op.W))
        found.append(replace(action, op=Op.I) if is_split else action)
    return tuple(reversed(found))


def has_more(one: Kept, other: Kept) -> bool:
    """Whether one moment has at least as many of all kinds as another, and more of some."""
    pairs = [pair for both in zip(one, other, strict=True) for pair in zip(*both, strict=True)]
    return one != other and all(first >= second for first, second in pairs)


@pytest.mark.parametrize("seed", range(100))
def test_the_fullest_moments_are_found(seed: int) -> None:
    chance = random.Random(seed)
    placement = PLACEMENTS[seed % len(PLACEMENTS)]
    schedule = random_schedule(placement, 6, forward_only=False, seed=seed)
    if chance.random() < 0.7:
        schedule = replace(schedule, orders=tuple(split_at_random(order, chance) for order in schedule.orders))
    for stage, num_replicas in enumerate(placement.num_replicas):
        workers = (placement.worker(stage, replica) for replica in range(num_replicas))
        moments = {moment for worker in workers for moment in kept(schedule, worker)}
        wanted = [one for one in moments if not any(has_more(other, one) for other in moments)]
        assert Counter(peaks_kept(schedule, stage)) == Counter(wanted)
        chunks = range(len(placement.vstages(stage)))
        most = tuple(max(moment[chunk][0] for moment in moments) for chunk in chunks)
        assert most_activations(peaks_kept(schedule, stage)) == most


def test_without_backwards_nothing_is_kept() -> None:
    schedule = random_schedule(u_placement(2), 3, forward_only=True, seed=0)
    assert [peaks_kept(schedule, stage) for stage in (0, 1)] == [(((0, 0), (0, 0)),), (((0, 0),),)]
    frozen = replace(u_placement(2), num_frozen=1)
    schedule = random_schedule(u_placement(2), 3, forward_only=False, seed=0)
    assert {moment[0] for moment in peaks_kept(replace(schedule, placement=frozen), 0)} == {(0, 0)}


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_three_groups_show_what_interleaving_keeps(num_stages: int, num_chunks: int) -> None:
    few, many = (interleaved_one_f_one_b(num_stages, num_chunks, groups * num_stages) for groups in (3, 8))
    for stage in range(num_stages):
        assert peaks_kept(few, stage) == peaks_kept(many, stage)
