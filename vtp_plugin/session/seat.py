"""Take part in a run whose list is fitted to the cards, or stay out of it: before the script starts."""

from __future__ import annotations

import atexit
import datetime
import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from vtp_plugin.errors import ConfigError, LayoutError
from vtp_plugin.fit.ask import Ask
from vtp_plugin.fit.cards import Node
from vtp_plugin.fit.choose import fit
from vtp_plugin.fit.reasons import describe
from vtp_plugin.fit.search import Fitted
from vtp_plugin.fit.seats import seat_cards
from vtp_plugin.ground import log
from vtp_plugin.runtime.life.cards import Card, settle_seats
from vtp_plugin.runtime.life.onlooker import Onlooker
from vtp_plugin.runtime.life.rendezvous import open_store, serves_store

_LINGER_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """What this process does in a fitted run.

    Attributes:
        rank: in the run; None for a spare rank.
        world_size: of the run.
        words: flags of the fitted list.
        why: the rank is spare.
        onlooker: tells when the run has ended.
    """

    rank: int | None
    world_size: int
    words: tuple[str, ...]
    why: str
    onlooker: Onlooker

    def wait_outside(self, own: Card) -> int:
        """Say that this rank is spare, wait until training ends, and return the exit status.

        Args:
            own: its card.
        """
        what = f"this rank is spare ({own.node}, local rank {own.local_rank}): {self.why}"
        _say(logging.WARNING, f"{what}; it holds no device and waits until training ends")
        failure = self.onlooker.wait()
        if failure is not None:
            _say(logging.ERROR, f"this rank was spare; the run ended: {failure}")
        return 0 if failure is None else 1


def take_seat(
    own: Card,
    make_ask: Callable[[], Ask],
    make_words: Callable[[Fitted, Ask], Sequence[str]],
    *,
    environment: MutableMapping[str, str],
    timeout_s: float,
) -> Seat:
    """Tell what this rank has, learn which list is fitted, and take the rank that this process has in it.

    Afterwards ``RANK`` and ``WORLD_SIZE`` are those of the fitted run, without holes. ``LOCAL_RANK`` stays the index of
    the device. The store stays where it is: to torch it is the launcher's from now on, whoever has become rank 0.

    Args:
        own: what this rank has.
        make_ask: reads on rank 0 what is wanted.
        make_words: gives the flags of a fitted list.
        environment: of this process, with the launcher's variables.
        timeout_s: how long to wait for other ranks.

    Raises:
        ConfigError: nothing fits, the ranks contradict each other, or no launcher started this process.
        PeerError: a rank did not come.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if not environment.get(name, "").isdigit():
            raise ConfigError(f"--vtp-size-list auto needs the launcher's {name}, which is not set; use torchrun")
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    serves = serves_store(rank, environment)
    store = open_store(rank, world_size, timeout_s)
    outcome = settle_seats(
        store,
        own,
        lambda cards: _decide(cards, make_ask(), make_words),
        rank=rank,
        world_size=world_size,
        timeout_s=timeout_s,
    )
    seats = {int(number): seat for number, seat in outcome["seats"].items()}
    onlooker = Onlooker(store, num_ranks=len(seats), timeout_s=timeout_s)
    seat = Seat(
        rank=seats.get(rank),
        world_size=len(seats),
        words=tuple(outcome["words"]),
        why=f"its card is {own.why}" if own.why else "the list that fits does without its card",
        onlooker=onlooker,
    )
    if rank == 0:
        begin = datetime.datetime.now().isoformat(sep=" ", timespec="microseconds")
        _say(logging.INFO, f"[{begin}] this attempt has {world_size} ranks, of which {len(seats)} work")
        for line in outcome["lines"]:
            _say(logging.INFO, line)
    # Runs last of all: what is registered first is called last.
    atexit.register(_leave, seat, num_others=world_size - 1, serves=serves)
    if seat.rank is not None:
        environment["RANK"], environment["WORLD_SIZE"] = str(seat.rank), str(seat.world_size)
        environment.setdefault("TORCHELASTIC_RESTART_COUNT", "0")
        if serves_store(0, environment):
            environment["TORCHELASTIC_USE_AGENT_STORE"], environment["TORCHELASTIC_RESTART_COUNT"] = "True", "0"
    return seat


def _decide(cards: Sequence[Card], ask: Ask, make_words: Callable[[Fitted, Ask], Sequence[str]]) -> Mapping[str, Any]:
    """Fit the list on rank 0."""
    nodes, numbers = _nodes(cards)
    fitted, rivals = fit(nodes, ask)
    layout = ask.layout(fitted.sizes, fitted.num_replicas)
    assert layout is not None
    bad = [f"{card.node} local rank {card.local_rank} is {card.why}" for card in cards if card.why]
    return {
        "seats": seat_cards(fitted, layout, numbers),
        "words": list(make_words(fitted, ask)),
        "lines": [*describe(fitted, ask, rivals), *(f"bad card: {line}" for line in bad)],
    }


def _nodes(cards: Sequence[Card]) -> tuple[list[Node], dict[str, list[int]]]:
    """Group ranks by their machines: the nodes, and of each the ranks whose cards work, by local rank."""
    versions = {card.versions: card.node for card in cards}
    if len(versions) > 1:
        shown = " and ".join(f"{text} on {node}" for text, node in [*versions.items()][:2])
        raise LayoutError(f"versions differ between nodes: {shown}; install the same ones")
    nodes: list[Node] = []
    numbers: dict[str, list[int]] = {}
    for name in dict.fromkeys(card.node for card in cards):
        own = [(card.local_rank, number) for number, card in enumerate(cards) if card.node == name]
        if len({place for place, _ in own}) < len(own):
            raise LayoutError(f"two ranks on {name} have one local rank; give each agent its --vtp-node name")
        sites = {card.site for card in cards if card.node == name}
        if len(sites) > 1:
            raise LayoutError(f"ranks on {name} name the sites {', '.join(sorted(sites))}; give one --vtp-site there")
        good = [number for _, number in sorted(own) if not cards[number].why]
        kinds = {cards[number].kind for number in good}
        if len(kinds) > 1:
            raise LayoutError(f"kinds of cards are mixed on {name}: {', '.join(sorted(kinds))}; give --vtp-device")
        nodes.append(Node(name=name, num_cards=len(good), site=sites.pop(), kind="".join(kinds)))
        numbers[name] = good
    return nodes, numbers


def _leave(seat: Seat, *, num_others: int, serves: bool) -> None:
    """End last if this process keeps the store, so that nobody loses it before."""
    try:
        if seat.rank is not None:
            seat.onlooker.leave()
        seat.onlooker.let_go(keeps_store=serves, num_others=num_others, limit_s=_LINGER_S)
    except RuntimeError:
        return  # the store is gone, and with it everybody who needs it


def _say(level: int, text: str) -> None:
    os.write(2, log.format_record(level, text, rank=log.launched_rank()).encode(errors="backslashreplace"))
