"""What is known of a checkpoint while it is being loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtp_plugin.runtime.stored_optimizer import StoredOptimizer


class Loading:
    """Keeps what one part of loading has found for the parts that come later.

    Attributes:
        stored_optimizer: what the checkpoint holds, if it is read into another layout; None otherwise.
    """

    def __init__(self) -> None:
        self.stored_optimizer: StoredOptimizer | None = None

    def keep(self, stored: StoredOptimizer | None) -> None:
        """Keep a stored optimizer for those that want something of it, or let it go."""
        self.stored_optimizer = stored
