"""The decision of the launcher's rank 0 for all ranks of an attempt, as it is posted to the store."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtp_plugin.elastic.progress import LastStep
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.runtime.health.store_posts import PostError
from vtp_plugin.tune.fit.chosen import Chosen


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
