"""What the launcher's rank 0 decides for all ranks of an attempt, as it crosses the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtp_plugin.elastic.progress import LastStep
from vtp_plugin.runtime.health.posts import PostError
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.tune.fit.chosen import Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Who does what. No flag is in it: each rank writes its own from the list.

    Attributes:
        seats: the rank in the fitted run of every rank that works there, by the launcher's rank.
        chosen: the list.
        why: why a card is bad, by the launcher's rank.
        last: last step of the attempt before.
    """

    seats: dict[int, int]
    chosen: Chosen
    why: dict[int, str] = field(default_factory=dict[int, str])
    last: LastStep | None = None

    def require_seats(self, world_size: int) -> None:
        """Go on only if the seats are ranks without holes, of ranks that are there.

        Args:
            world_size: of the launcher.

        Raises:
            PeerError: they are something else.
        """
        is_sound = sorted(self.seats.values()) == [*range(len(self.seats))] and all(
            number < world_size for number in self.seats
        )
        if not self.seats or not is_sound:
            raise PostError(Topic.CARDS.key, "seats", f"gives {len(self.seats)} seats, which are no ranks 0, 1, ...")
