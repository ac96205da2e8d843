"""Cards: whether each works, and how a run on them ended."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from vtp_plugin.elastic.card_probe import READY
from vtp_plugin.elastic.progress import LastStep
from vtp_plugin.errors import LayoutError, PeerError, ShortageError, is_final
from vtp_plugin.runtime.health.redaction import Redaction, first_line
from vtp_plugin.runtime.health.startup_waiting import (
    JUDGE_SHARE,
    STORE_KEEPER,
    WAITED,
    AwakeClock,
    WaitingLines,
    await_readers,
    poll,
    some_ranks,
    tell_read,
    time_limit,
    until_store_ends,
)
from vtp_plugin.runtime.health.store import PostError, Topic, parse_post, part_of, read_post
from vtp_plugin.tune.fit.fit_layout import Chosen
from vtp_plugin.util.text import one_line
from vtp_plugin.util.typed_json import ShapeError, read_typed


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Which ranks work, and in which list. It holds no flags: each rank derives its own from the list.

    Attributes:
        seats: rank in the fitted run, by the launcher's rank; spare ranks have none.
        chosen: the list, with its layers and replicas.
        why: reasons why cards are bad, by the launcher's rank.
        last: last step of the previous attempt; None if there was none.
    """

    seats: dict[int, int]
    chosen: Chosen
    why: dict[int, str] = field(default_factory=dict[int, str])
    last: LastStep | None = None

    def require_seats(self, world_size: int) -> None:
        """Refuse seats that are not the numbers 0, 1, ... for ranks that the launcher has started.

        Args:
            world_size: number of ranks that the launcher has started.

        Raises:
            PeerError: the seats are something else.
        """
        is_sound = sorted(self.seats.values()) == [*range(len(self.seats))] and all(
            number < world_size for number in self.seats
        )
        if not self.seats or not is_sound:
            raise PostError(Topic.CARDS.key, "seats", f"gives {len(self.seats)} seats, which are no ranks 0, 1, ...")


_PROBE = Path(__file__).with_name("card_probe.py")
_LOOK_S, _END_S = 0.1, 1.0
# Errors that end a fit; a class stands before those that it inherits from.
_KINDS = (PeerError, ShortageError, LayoutError)
# Tests simulate bad cards with it.
FAULT_FILE_VARIABLE = "VTP_FAULT_FILE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCard:
    """The card of a rank, and the machine it is in.

    Attributes:
        node: name of the machine.
        local_rank: index of the card in the machine.
        site: site of the machine; empty where sites have no names.
        kind: kind of the card, such as ``cuda``; empty if the card did not answer.
        why: why the card is bad; empty if it is good.
        versions: versions of the packages that must be the same on all nodes.
        reported: what it has reported in an earlier attempt, as far as others may read it; empty for nothing.
    """

    node: str
    local_rank: int
    site: str
    kind: str
    why: str
    versions: str
    reported: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Result of trying a card, see ``card_probe.py``."""

    kind: str
    why: str


def try_card(device: str, node: str, local_rank: int, limit_s: float, start_limit_s: float = 300.0) -> tuple[str, str]:
    """Try a card in a process of its own.

    Time in which this process itself stands still, as on a busy or suspended machine, does not count.

    Args:
        device: ``cuda``, ``npu``, ``cpu``, or ``auto`` for the first of these that is there.
        node: name of this machine.
        local_rank: index of the card.
        limit_s: seconds after which the card counts as not answering; they begin when the process uses it.
        start_limit_s: seconds after which that process counts as slow, if it has not used the card yet.

    Returns:
        The kind of the card, and why it is bad; empty if it is good. A why that begins with a word of
        ``failed_cards.UNTESTED`` says nothing of the card.
    """
    command = [sys.executable, str(_PROBE), device, node, str(local_rank), os.environ.get(FAULT_FILE_VARIABLE, "")]
    try:
        test = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        return "", f"untested: its test could not be started ({error.strerror})"
    clock, is_ready, has_ended, said, complaint = AwakeClock(), False, False, b"", b""
    while not has_ended:
        has_ended = test.poll() is not None  # what is read afterwards is all that it has said
        said, complaint = _read(test, _LOOK_S)
        if not is_ready and READY in _lines(said):
            clock, is_ready = AwakeClock(), True
        if not has_ended and test.poll() is None and clock.seconds() > (limit_s if is_ready else start_limit_s):
            test.kill()
            _leave(test)
            if is_ready:
                return "", f"hanging: no answer within {limit_s:g} s"
            return "", f"slow: its test did not start within {start_limit_s:g} s (a busy machine or a slow disk)"
    _leave(test)
    lines = _lines(said)
    if code := test.returncode:
        last = "".join(_lines(complaint)[-1:])
        text = f"its test ended with {code} ({first_line(last) or 'no message'})"
        if not is_ready or -code in (signal.SIGKILL, signal.SIGTERM) or "out of memory" in last:
            return "", f"untested: {text}, which says nothing of the device"
        return "", f"erring: {text}"
    try:
        found = read_typed(_Found, "".join(lines[-1:]))
    except ShapeError as error:
        return "", f"erring: what its test printed {error}"
    return found.kind, found.why


def _lines(data: bytes) -> list[str]:
    return data.decode(errors="backslashreplace").strip().splitlines()


def _read(test: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, bytes]:
    """Read what a test has printed so far; a process that it has started may keep the pipes open."""
    try:
        return test.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        return late.output or b"", late.stderr or b""


def _leave(test: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a test, but not for long: the driver of a bad card may keep the process for ever."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        test.wait(_END_S)
    for pipe in (test.stdout, test.stderr):
        assert pipe is not None
        pipe.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Why no list was fitted.

    Attributes:
        error: text of the error, one line.
        kind: name of the error's class.
        is_final: whether no restart cures it.
    """

    error: str
    kind: str
    is_final: bool


@until_store_ends(STORE_KEEPER, "the choice of the layout")
def settle_seats(
    store: dist.Store,
    own: RankCard,
    decide: Callable[[Sequence[RankCard]], Outcome],
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    redaction: Redaction,
) -> Outcome:
    """Post what this rank has, and return what rank 0 decides for all.

    Args:
        store: reaches all ranks.
        own: card of this rank.
        decide: called on rank 0 with the cards of all ranks.
        rank: this rank, as the launcher numbers it.
        world_size: number of ranks that the launcher started.
        timeout_s: how long to wait for the others.
        redaction: says what the others may learn from this rank.

    Raises:
        ShortageError: rank 0 found that too few cards are there; the text is the same on all ranks of its site.
        ConfigError: rank 0 found that nothing fits; likewise the same text on all ranks of its site.
        PeerError: a rank did not come, or somebody has posted what no rank posts.
    """
    part = part_of(store, Topic.CARDS)
    limited = functools.partial(time_limit, rank, timeout_s, "for the store at the choice of the layout: no answer")
    with limited():
        part.set(
            str(rank),
            json.dumps(asdict(replace(own, why=redaction.reason(own.why), reported=redaction.reason(own.reported)))),
        )
    if rank == 0:
        try:
            with limited():
                cards = _cards(part, world_size, timeout_s)
            outcome = decide(cards)
        except Exception as error:
            kinds = (one for one in _KINDS if isinstance(error, one))
            text = one_line(redaction.describe(error))
            ended = Ended(error=text, kind=next(kinds, LayoutError).__name__, is_final=is_final(error))
            part.set("seats", json.dumps(asdict(ended)))
            # This process may own the store's server: it leaves last, or the others never learn why.
            num_others = sum(part.check([str(other)]) for other in range(1, world_size))
            await_readers(part, "read", num_others, timeout_s)
            raise
        post = json.dumps(asdict(outcome))
        part.set("seats", post)
    else:
        lines = WaitingLines(timeout_s, lambda: "rank 0, which chooses the layout")
        with limited():
            if not poll(lambda: part.check(["seats"]), timeout_s, pause_s=0.1, lines=lines):
                raise PeerError(
                    f"{WAITED} {timeout_s:.1f} s for rank 0 to choose the layout: no answer; look for a rank 0 that "
                    "ended"
                )
            post = part.get("seats")
            tell_read(part, "read")
        if "error" in parse_post(dict[str, object], post, Topic.CARDS.key, "seats"):
            ended = parse_post(Ended, post, Topic.CARDS.key, "seats")
            if not ended.error:
                raise PostError(Topic.CARDS.key, "seats", "has an error without a text")
            raised = next((one for one in _KINDS if one.__name__ == ended.kind), PeerError)
            raise raised(ended.error, is_final=ended.is_final and redaction.trusts_coordinator)
    return parse_post(Outcome, post, Topic.CARDS.key, "seats")


def _cards(part: dist.Store, world_size: int, timeout_s: float) -> list[RankCard]:
    """Wait on rank 0 for the cards of all ranks.

    Raises:
        PeerError: a rank did not come, or posted something else.
    """
    keys, limit_s, begin_s = [str(rank) for rank in range(world_size)], JUDGE_SHARE * timeout_s, time.monotonic()

    def missing() -> list[int]:
        return [int(key) for key in keys if not part.check([key])]

    lines = WaitingLines(limit_s, lambda: f"rank {some_ranks(missing())}")
    if not poll(lambda: part.check(keys), limit_s, pause_s=0.1, lines=lines):
        waited = f"{WAITED} {time.monotonic() - begin_s:.1f} s"
        text = f"{waited} for the device of rank {some_ranks(missing())}: no answer"
        raise PeerError(text, shared=text)
    return [read_post(RankCard, part, key, Topic.CARDS.key) for key in keys]
