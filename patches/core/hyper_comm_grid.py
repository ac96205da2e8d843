"""`module-channels/destroy`: a grid's end is also that of the channels between its stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.core.hyper_comm_grid:HyperCommGrid.destroy",
    id="module-channels/destroy",
    when=Moment.BRIDGES,
    versions=">=0.19,<0.20",
)
def _destroy(session: Session, original: Callable[..., None], grid: Any) -> None:
    """End the channels of a grid, if it has any, and then its groups.

    Why: a planned order opens channels between the stages of a module, of which its grid knows nothing; their groups
    end with those of the grid.

    Remove when: Megatron's schedules take an order of actions.
    """
    if "pp" in grid.dim_names:
        # Without such a group there are no channels.
        with suppress(KeyError):
            session.close_module(grid.get_pg("pp"))
    original(grid)
