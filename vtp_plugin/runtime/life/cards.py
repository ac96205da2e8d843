"""What each rank has before a list is fitted, and the post in which one rank says who does what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vtp_plugin.errors import LayoutError, PeerError, ShortageError, VtpError
from vtp_plugin.runtime.life.disclosure import first_line
from vtp_plugin.runtime.life.store import Topic, part_of
from vtp_plugin.runtime.life.waiting import JUDGE_SHARE, WAITED, WaitingLines, poll, some_ranks

_PROBE = Path(__file__).with_name("card_probe.py")
_FAREWELL_S = 5.0
# Errors by which a fit ends, of classes that inherit from each other the inner one first.
_KINDS = (PeerError, ShortageError, LayoutError)
# Tests play bad cards with it.
FAULT_FILE_VARIABLE = "VTP_FAULT_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank has.

    Attributes:
        node: name of its machine.
        local_rank: index of the card there.
        site: of the machine; empty where sites have no names.
        kind: of the card, such as ``cuda``; empty if it did not answer.
        why: it is bad; empty if it is good.
        versions: of what must be the same on all nodes.
    """

    node: str
    local_rank: int
    site: str
    kind: str
    why: str
    versions: str


def try_card(device: str, node: str, local_rank: int, limit_s: float) -> tuple[str, str]:
    """Try a card in a process of its own.

    Args:
        device: as for :func:`~vtp_plugin.runtime.life.card_probe.probe`; so are the next two.
        node: name of this machine.
        local_rank: index of the card.
        limit_s: after so long it does not answer.

    Returns:
        The kind of the card, and why it is bad; empty if it is good.
    """
    words = [sys.executable, str(_PROBE), device, node, str(local_rank), os.environ.get(FAULT_FILE_VARIABLE, "")]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "", f"hanging: no answer within {limit_s:g} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return "", f"erring: the try ended with {done.returncode} ({first_line(lines[-1]) if lines else 'no message'})"
    found = json.loads(done.stdout.splitlines()[-1])
    return found["kind"], found["why"]


def settle_seats(
    store: dist.Store,
    own: Card,
    decide: Callable[[Sequence[Card]], Mapping[str, Any]],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
) -> Mapping[str, Any]:
    """Tell what this rank has, and learn what rank 0 decides for all.

    Args:
        store: reaches all ranks.
        own: what this rank has.
        decide: called on rank 0 with the cards of all ranks; gives JSON values.
        rank: this rank, as the launcher numbers it.
        world_size: number of ranks that the launcher started.
        timeout_s: how long to wait for the others.

    Raises:
        ShortageError: rank 0 found that too few cards are there; the text is the same on all ranks.
        ConfigError: rank 0 found that nothing fits; as before.
        PeerError: a rank did not come.
    """
    part = part_of(store, Topic.CARDS)
    part.set(str(rank), json.dumps(asdict(own)))
    if rank == 0:
        outcome = _decide(part, decide, world_size, timeout_s)
        part.set("seats", json.dumps(outcome))
        if "error" in outcome:
            # This process may own the store's server: it leaves last, or the others never learn why.
            poll(lambda: part.add("read", 0) >= world_size - 1, _FAREWELL_S)
    else:
        lines = WaitingLines(timeout_s, lambda: "rank 0, which fits the list to the cards")
        if not poll(lambda: part.check(["seats"]), timeout_s, pause_s=0.1, lines=lines):
            raise PeerError(
                f"{WAITED} {timeout_s:.1f} s for rank 0 to fit the list: no answer; look for a rank 0 that ended"
            )
        outcome = json.loads(part.get("seats"))
        part.add("read", 1)
    if "error" in outcome:
        kind = next(kind for kind in _KINDS if kind.__name__ == outcome["kind"])
        raise kind(outcome["error"], is_final=outcome["is_final"])
    return outcome


def _decide(
    part: dist.Store, decide: Callable[[Sequence[Card]], Mapping[str, Any]], world_size: int, timeout_s: float
) -> Mapping[str, Any]:
    keys, limit_s, begin_s = [str(rank) for rank in range(world_size)], JUDGE_SHARE * timeout_s, time.monotonic()

    def missing() -> list[int]:
        return [int(key) for key in keys if not part.check([key])]

    lines = WaitingLines(limit_s, lambda: f"rank {some_ranks(missing())}")
    if not poll(lambda: part.check(keys), limit_s, pause_s=0.1, lines=lines):
        waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
        text = f"{waited} for the card of rank {some_ranks(missing())}: no answer"
        return {"error": text, "kind": PeerError.__name__, "is_final": False}
    try:
        return decide([Card(**json.loads(part.get(key))) for key in keys])
    except VtpError as error:
        kind = next((kind for kind in _KINDS if isinstance(error, kind)), LayoutError)
        return {"error": str(error), "kind": kind.__name__, "is_final": error.is_final}
