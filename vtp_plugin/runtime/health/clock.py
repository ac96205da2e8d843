"""How far the clocks of ranks are apart, estimated over the store by round trips."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.runtime.health.store import Topic, open_round, part_of
from vtp_plugin.runtime.health.store_posts import read_post
from vtp_plugin.runtime.health.waiting import STORE_KEEPER, until_store_ends

# Most round trips are as long as the shortest; a few are held up. On each, rank 0 answers once.
_NUM_ROUND_TRIPS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """How far a rank's clock was behind that of rank 0.

    Attributes:
        at_s: time of the estimate, in seconds of the rank's own clock.
        offset_s: seconds to add to the rank's clock to get that of rank 0.
        error_s: largest error of the offset, in seconds: half of the shortest round trip.
    """

    at_s: float
    offset_s: float
    error_s: float


@until_store_ends(STORE_KEEPER, "comparison of clocks")
def estimate_offset(store: dist.Store, *, rank: int, world_size: int, timeout_s: float) -> ClockOffset:
    """Compare this rank's clock, ``time.perf_counter``, with that of rank 0; a collective call of all ranks.

    A rank asks, and rank 0 answers with its time, which lies between the question and the answer: the middle is off by
    at most half of the round trip. The shortest of a few round trips counts. Rank 0 serves one rank after another.

    Args:
        store: reaches all ranks.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: how long to wait for another rank.

    Raises:
        PeerError: no answer came within the timeout, or it is no time.
    """
    exchange = open_round(part_of(store, Topic.CLOCKS), rank)
    posts, limit = exchange.posts, timedelta(seconds=timeout_s)
    numbers = range(_NUM_ROUND_TRIPS)
    try:
        if rank == 0:
            others = range(1, world_size)
            for other in others:
                for number in numbers:
                    posts.wait([f"{other} asks {number}"], limit)
                    posts.set(f"{other} hears {number}", repr(time.perf_counter()))
            exchange.clear_last(
                [f"{other} {word} {n}" for other in others for n in numbers for word in ("asks", "hears")]
            )
            return ClockOffset(at_s=time.perf_counter(), offset_s=0.0, error_s=0.0)
        return min((_ask(posts, rank, number, limit) for number in numbers), key=lambda offset: offset.error_s)
    except dist.DistStoreError as error:
        whom = "another rank" if rank == 0 else "rank 0"
        raise PeerError(f"comparison of clocks: waited {timeout_s:g} s for {whom}: no answer") from error


def _ask(posts: dist.Store, rank: int, number: int, limit: timedelta) -> ClockOffset:
    """Make one round trip."""
    asked_s = time.perf_counter()
    posts.set(f"{rank} asks {number}", "")
    posts.wait([f"{rank} hears {number}"], limit)
    # The answer is there now; reading it takes one more round trip, which is to count for nothing.
    heard_s = time.perf_counter()
    other_s = read_post(float, posts, f"{rank} hears {number}", Topic.CLOCKS.key)
    middle_s = (asked_s + heard_s) / 2
    return ClockOffset(at_s=middle_s, offset_s=other_s - middle_s, error_s=(heard_s - asked_s) / 2)
