"""How a process takes its place in a run, or waits outside it."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass

import torch.distributed as dist

from vtp_plugin.checkpoint.save.saving import LOCK_VARIABLE
from vtp_plugin.config.flag import format_value
from vtp_plugin.elastic.cards import RankCard, settle_seats
from vtp_plugin.elastic.coordinator import Coordinator
from vtp_plugin.elastic.failed_cards import CARD_VARIABLE, name_card
from vtp_plugin.elastic.progress import forget_failed_starts, hand_on, note_end
from vtp_plugin.errors import ConfigError, ShortageError
from vtp_plugin.plan.launch.launch_commands import SHARE_VARIABLE
from vtp_plugin.runtime.health.meeting_store import (
    ATTEMPT_VARIABLE,
    KEEPER_VARIABLE,
    is_agent_store,
    open_own_store,
    open_store,
    serves_store,
)
from vtp_plugin.runtime.health.monitor import DONE
from vtp_plugin.runtime.health.redaction import SPEAKER_VARIABLE
from vtp_plugin.runtime.health.startup_waiting import AwakeClock, poll, time_limit
from vtp_plugin.runtime.health.store import Board, Round, Topic, connect_again, name_run, part_of
from vtp_plugin.util import log

_LOOK_AT_RUN_S = 1.0


class SpareRank:
    """Waits for the end of a run outside it, by reading what the run's monitors write.

    Args:
        store: store of the run.
        num_ranks: number of ranks of the run.
        timeout_s: timeout of the run: if its ranks stop showing signs of life, the run ends within it.
    """

    def __init__(self, store: dist.Store, *, num_ranks: int, timeout_s: float) -> None:
        self._part = part_of(store, Topic.CARDS)
        self._store = store
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s

    def leave(self) -> None:
        """Note that this rank of the run has ended well; its process calls it last."""
        self._part.add("ended", 1)

    def let_go(self, *, keeps_store: bool, num_others: int, limit_s: float) -> None:
        """Note that this process needs the store no longer; one that keeps it waits for the others.

        Args:
            keeps_store: whether this process serves the store.
            num_others: number of other processes that use the store.
            limit_s: how long to wait for them.
        """
        if keeps_store:
            poll(lambda: self._part.add("left", 0) >= num_others, limit_s, pause_s=0.1)
        else:
            self._part.add("left", 1)

    def wait(self) -> str | None:
        """Wait for the end of the run. Return why it failed; None if all its ranks ended well."""
        life, silence = -1, AwakeClock()
        watched: dist.Store | None = None
        try:
            while self._part.add("ended", 0) < self._num_ranks:
                if watched is None and part_of(self._store, Topic.WATCH).check(["name"]):
                    watched = Round(part_of(connect_again(self._store), Topic.WATCH), 1).posts
                if watched is None:
                    # Ranks that are still starting end by themselves if one of them does not come.
                    silence = AwakeClock()
                else:
                    if (failure := Board(watched).read().failure) is not None:
                        return failure
                    seen = watched.add("life/0", 0)
                    if seen != life or seen >= DONE:
                        life, silence = seen, AwakeClock()
                if self._num_ranks > 1 and silence.seconds() > self._timeout_s:
                    return f"rank 0 showed no sign of life for {self._timeout_s:.0f} s"
                time.sleep(_LOOK_AT_RUN_S)
        except RuntimeError:
            return "the store of the run is gone"
        return None


_LINGER_S = 60.0
_FAREWELL_S = 5.0
_LOOK_S = 0.5


@dataclass(slots=True, kw_only=True)
class Membership:
    """The part of this process in a fitted run.

    Attributes:
        rank: rank of this process in the run; None if it is spare.
        world_size: number of ranks of the run.
        argv: flags of the fitted list.
        why: why the rank is spare; of no use on the others.
        spare_rank: tells when the run has ended.
        coordinator: keeps the folder of checkpoints, on the launcher's rank 0.
        has_ended: whether the script has ended well in this process; on a spare rank, whether the run has.
    """

    rank: int | None
    world_size: int
    argv: tuple[str, ...]
    why: str
    spare_rank: SpareRank
    coordinator: Coordinator
    has_ended: bool = False

    def end(self) -> None:
        """Note that the script has ended well."""
        self.has_ended = True
        forget_failed_starts()
        if self.rank == 0 and self.coordinator.folder is not None:
            note_end(self.coordinator.folder)

    def wait_outside(self, own: RankCard) -> int:
        """Log that this rank is spare, wait until training ends, and return the exit status.

        Args:
            own: card of this rank.
        """
        what = f"this rank is spare ({own.node}, local rank {own.local_rank}): {self.why}"
        _say(logging.WARNING, f"{what}; it holds no device and waits until training ends")
        failure = self.spare_rank.wait()
        if failure is not None:
            _say(logging.ERROR, f"this rank was spare; the run ended: {failure}")
        self.has_ended = failure is None
        return 0 if failure is None else 1


def join_run(
    own: RankCard,
    coordinator: Coordinator,
    *,
    environment: MutableMapping[str, str],
    timeout_s: float,
) -> Membership:
    """Post the device of this rank, learn which layout is chosen, and take this process's rank in that run.

    Afterwards ``RANK`` and ``WORLD_SIZE`` are those of that run, without gaps. ``LOCAL_RANK`` stays the index of
    the device. The store stays where it is: torch takes it for the launcher's from now on, whoever is rank 0.

    Args:
        own: card of this rank.
        coordinator: decides on the launcher's rank 0.
        environment: variables of this process, with the launcher's; changed to those of the fitted run.
        timeout_s: how long to wait for other ranks, and for more cards where there are too few.

    Raises:
        ShortageError: too few cards were there all the time.
        ConfigError: nothing fits, the ranks contradict each other, or no launcher started this process.
        PeerError: a rank did not come, or somebody has posted what no rank posts.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not environment.get(name, "").isdigit():
            raise ConfigError(f"--vtp-size-list auto needs the launcher's {name}, which is not set; use torchrun")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = open_store(rank, world_size, timeout_s)
    if is_agent_store(environment):
        if rank == 0 and environment.get("GROUP_WORLD_SIZE", "1") != "1":
            _say(
                logging.WARNING,
                "if the first machine is lost, whose launcher keeps the store, the run ends on all machines; with "
                f"{SHARE_VARIABLE}=1 on every machine elastic torchrun survives that, see docs/guides/lost-cards.md",
            )
        with time_limit(rank, timeout_s, "for the store of this attempt: no answer"):
            store = open_own_store(store, rank, environment, timeout_s)
    with time_limit(rank, timeout_s, "for the store: no answer"):
        environment[LOCK_VARIABLE] = name_run(store)
    serves = serves_store(rank, environment)
    try:
        outcome = settle_seats(
            store,
            own,
            coordinator.decide,
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            redaction=coordinator.redaction,
        )
    except ShortageError as error:
        _await_cards(error, timeout_s)
        raise
    outcome.require_seats(world_size)
    seats, why = outcome.seats, own.why or outcome.why.get(rank, "")
    spare_rank = SpareRank(store, num_ranks=len(seats), timeout_s=timeout_s)
    membership = Membership(
        rank=seats.get(rank),
        world_size=len(seats),
        argv=coordinator.argv(outcome.chosen, len(seats)),
        why=f"its device is {why}" if why else "the chosen layout does not need its device",
        spare_rank=spare_rank,
        coordinator=coordinator,
    )
    if rank == 0:
        _say_beginning(coordinator, world_size, len(seats))
    # Runs last of all: the handler that is registered first is called last.
    atexit.register(_leave, membership, num_others=world_size - 1, serves=serves)
    if membership.rank is not None:
        environment["RANK"], environment["WORLD_SIZE"] = str(membership.rank), str(membership.world_size)
        environment[CARD_VARIABLE] = name_card(own)
        environment[SPEAKER_VARIABLE] = _speaker(rank, int(environment["LOCAL_RANK"]), seats)
        environment[KEEPER_VARIABLE] = f"rank {seats[0]}" if 0 in seats else "a spare rank, the launcher's rank 0,"
        last = None if outcome.last is None else asdict(outcome.last)
        hand_on(format_value(outcome.chosen.sizes), last, environment)
        environment["TORCHELASTIC_USE_AGENT_STORE"], environment[ATTEMPT_VARIABLE] = "True", "0"
    return membership


def _speaker(rank: int, local_rank: int, seats: Mapping[int, int]) -> str:
    """Give the local rank of the first rank of this machine that is not spare."""
    first = rank - local_rank
    return str(next(other for other in range(first, rank + 1) if other in seats) - first)


def _say_beginning(coordinator: Coordinator, num_ranks: int, num_working: int) -> None:
    begin = datetime.datetime.now().isoformat(sep=" ", timespec="microseconds")
    _say(logging.INFO, f"[{begin}] this attempt has {num_ranks} ranks and uses {num_working} of them")
    for line in coordinator.lines:
        _say(logging.INFO, line)


def _await_cards(error: ShortageError, limit_s: float) -> None:
    """Wait for more cards: each end costs one of the launcher's restarts, and it restarts for a new machine anyway.

    Args:
        error: error with which this process ends afterwards.
        limit_s: how long to wait.
    """
    launcher = os.getppid()
    _say(
        logging.WARNING,
        f"{error}; waits {limit_s:.0f} s for more devices: a machine that comes back restarts the run",
    )
    poll(lambda: os.getppid() != launcher, limit_s, pause_s=_LOOK_S)


def _leave(membership: Membership, *, num_others: int, serves: bool) -> None:
    """Leave the run: a process that keeps the store ends last; one whose script has failed ends at once."""
    membership.coordinator.close()
    if membership.rank is not None and not membership.has_ended:
        return
    try:
        if membership.rank is not None:
            membership.spare_rank.leave()
        # Ranks that have failed do not tell that they are gone.
        limit_s = _LINGER_S if membership.has_ended else _FAREWELL_S
        membership.spare_rank.let_go(keeps_store=serves, num_others=num_others, limit_s=limit_s)
    except RuntimeError:
        return  # the store is gone, and with it everybody who needs it


def _say(level: int, text: str) -> None:
    os.write(2, log.format_record(level, text, rank=log.launched_rank()).encode(errors="backslashreplace"))
