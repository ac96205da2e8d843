"""B7: a grid's end is also that of the channels between its stages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.patching.record import wrap_with
from vtp_plugin.session.modules import close_module
from vtp_plugin.session.surroundings import Surroundings


def records(surroundings: Surroundings) -> tuple[PatchRecord, ...]:
    """Give the record that ends a module's channels with its grid."""
    return (
        PatchRecord(
            id="B7",
            target="megatron.core.hyper_comm_grid:HyperCommGrid.destroy",
            build=wrap_with(_destroy, surroundings),
            why="a planned order opens channels between the stages of a module, of which its grid knows nothing; their "
            "groups end with those of the grid",
            remove_when="Megatron's schedules take an order of actions",
            versions=">=0.19,<0.20",
        ),
    )


def _destroy(surroundings: Surroundings, original: Callable[..., None], grid: Any) -> None:
    """End the channels of a grid, if it has any, and then its groups."""
    session = surroundings.session
    if session is not None and "pp" in grid.dim_names:
        # Without such a group there are no channels.
        with suppress(KeyError):
            close_module(session.modules, grid.get_pg("pp"))
    original(grid)
