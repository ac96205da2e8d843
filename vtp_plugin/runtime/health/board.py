"""What all ranks read at every look: one text in the store, which changes as a whole.

So nobody sees half of a change, whoever dies meanwhile or changes it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from vtp_plugin.runtime.health.posts import PostError, parse_post
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.util.printable import one_line

_KEY = "board"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """The rank that was the first to end without an error, and how far it came.

    Attributes:
        rank: its number.
        num_passes: it has begun so many of what all ranks do together.
        is_inside: the last of these was not over.
    """

    rank: int
    num_passes: int
    is_inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """What stands on the board.

    Attributes:
        num_calls: of the roll.
        leaver: see there; None while all ranks are there.
        failure: the first that was posted; None while there is none.
    """

    num_calls: int = 0
    leaver: Leaver | None = None
    failure: str | None = None

    @classmethod
    def of(cls, text: str) -> Notices:
        """Read the board; it is empty at first.

        Raises:
            PeerError: no rank has written this.

        >>> Notices.of(Notices(num_calls=2, leaver=Leaver(rank=1, num_passes=3, is_inside=False)).text).leaver.rank
        1
        """
        return parse_post(cls, text, Topic.WATCH.key, _KEY) if text else cls()

    @property
    def text(self) -> str:
        """As it stands in the store."""
        return json.dumps(asdict(self))


class Board:
    """Reads and changes the notices. Each call takes few requests of the store, and a change is one.

    Args:
        store: of the monitors.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._text = ""

    def read(self) -> Notices:
        """Return what stands there; what no rank has written is a failure, with which the run ends."""
        # The store has no read that neither waits nor fails where nothing was written.
        self._text = _decoded(self._store.compare_set(_KEY, "", ""))
        try:
            return Notices.of(self._text)
        except PostError as error:
            return Notices(failure=str(error))

    def call_roll(self) -> int:
        """Call the roll and return the number of a call that was not there before."""
        before = self.read().num_calls
        return self._change(lambda now: replace(now, num_calls=max(now.num_calls, before + 1))).num_calls

    def leave(self, leaver: Leaver) -> Leaver:
        """Note that a rank ends without an error, and return the first that did."""
        first = self._change(lambda now: replace(now, leaver=now.leaver or leaver)).leaver
        return first or leaver

    def post(self, failure: str) -> str:
        """Post a failure, and return the first that was posted."""
        own = one_line(failure)
        first = self._change(lambda now: replace(now, failure=now.failure or own)).failure
        return failure if first in (None, own) else first

    def _change(self, change: Callable[[Notices], Notices]) -> Notices:
        """Change what stands there, however it changes meanwhile, and return it."""
        text = self._text
        while True:
            try:
                now = Notices.of(text)
            except PostError as error:
                return Notices(failure=str(error))
            wanted = change(now)
            if wanted == now:
                return now
            found = _decoded(self._store.compare_set(_KEY, text, wanted.text))
            if found == wanted.text:
                self._text = found
                return wanted
            text = found


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
