"""What all ranks read at every look: one text in the store, which changes as a whole.

So nobody sees half of a change, whoever dies meanwhile or changes it, too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch.distributed as dist

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

        >>> Notices.of(Notices(num_calls=2, leaver=Leaver(rank=1, num_passes=3, is_inside=False)).text).leaver.rank
        1
        """
        if not text:
            return cls()
        fields = json.loads(text)
        leaver = fields.pop("leaver")
        return cls(leaver=None if leaver is None else Leaver(**leaver), **fields)

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
        """Return what stands there. The store has no read that neither waits nor fails where nothing was written."""
        self._text = self._store.compare_set(_KEY, "", "").decode()
        return Notices.of(self._text)

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
        return self._change(lambda now: replace(now, failure=now.failure or failure)).failure or failure

    def _change(self, change: Callable[[Notices], Notices]) -> Notices:
        """Change what stands there, however it changes meanwhile, and return it."""
        text = self._text
        while True:
            now = Notices.of(text)
            wanted = change(now)
            if wanted == now:
                return now
            found = self._store.compare_set(_KEY, text, wanted.text).decode()
            if found == wanted.text:
                self._text = found
                return wanted
            text = found
