"""The notices that every monitor reads: one text in the store, which changes atomically.

So no rank sees half of a change, even if another rank dies meanwhile or changes it as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.runtime.health.store_posts import PostError, parse_post
from vtp_plugin.util.printable import one_line

_KEY = "board"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaver:
    """The rank that was the first to end without an error, and how far it came.

    Attributes:
        rank: global rank.
        num_passes: number of joint operations (checks, steps, evaluations) that it has begun.
        is_inside: whether it had not finished the last of them.
    """

    rank: int
    num_passes: int
    is_inside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Notices:
    """The text on the board.

    Attributes:
        num_calls: number of liveness checks so far.
        leaver: first rank that has ended without an error; None while there is none.
        failure: first failure that was posted; None while there is none.
    """

    num_calls: int = 0
    leaver: Leaver | None = None
    failure: str | None = None

    @classmethod
    def of(cls, text: str) -> Notices:
        """Parse the text of the board; it is empty at first.

        Raises:
            PeerError: the text is not one that a rank writes.

        >>> Notices.of(Notices(num_calls=2, leaver=Leaver(rank=1, num_passes=3, is_inside=False)).text).leaver.rank
        1
        """
        return parse_post(cls, text, Topic.WATCH.key, _KEY) if text else cls()

    @property
    def text(self) -> str:
        """The notices as they are written to the store."""
        return json.dumps(asdict(self))


class Board:
    """Reads and changes the notices, by few requests to the store; a change is one request.

    Args:
        store: store of the monitors.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._text = ""

    def read(self) -> Notices:
        """Return the notices; a text that no rank writes counts as a failure, which ends the run."""
        # The store has no read that neither waits nor fails where nothing was written.
        self._text = _decoded(self._store.compare_set(_KEY, "", ""))
        try:
            return Notices.of(self._text)
        except PostError as error:
            return Notices(failure=str(error))

    def call_all(self) -> int:
        """Begin a liveness check and return its number."""
        before = self.read().num_calls
        return self._change(lambda now: replace(now, num_calls=max(now.num_calls, before + 1))).num_calls

    def leave(self, leaver: Leaver) -> Leaver:
        """Note that a rank ends without an error, and return the first rank that did."""
        first = self._change(lambda now: replace(now, leaver=now.leaver or leaver)).leaver
        return first or leaver

    def post(self, failure: str) -> str:
        """Post a failure, and return the first one that was posted."""
        own = one_line(failure)
        first = self._change(lambda now: replace(now, failure=now.failure or own)).failure
        return failure if first in (None, own) else first

    def _change(self, change: Callable[[Notices], Notices]) -> Notices:
        """Apply a change, again if another rank changes the text meanwhile, and return the result."""
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
            if found == text:  # bytes that only look like it
                return Notices(failure=str(PostError(Topic.WATCH.key, _KEY, "is no UTF-8")))
            text = found


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")
