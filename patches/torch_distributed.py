"""H10: all ranks meet, within the plugin's timeout, before torch waits for them for half an hour."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

from vtp_plugin.patching import PatchRecord
from vtp_plugin.runtime.startup import open_store
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module; their host is torch, not Megatron."""
    return (
        PatchRecord(
            id="H10",
            target="torch.distributed.distributed_c10d:init_process_group",
            build=functools.partial(_init, session),
            why="it waits for missing ranks for its own timeout, 30 minutes by default, and does not name them; "
            "without megatron.training it is the first point at which all ranks meet",
            versions=">=2.6,<3",
            remove_when="torch names the missing ranks",
        ),
    )


def _init(session: Session, original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        place = None if session.monitor is not None else _place(signature.bind(*args, **kwargs).arguments)
        if place is not None:
            rank, world_size = place
            store = open_store(rank, world_size, session.config.timeout_s)
            session.agree(store, session.request_statement, rank=rank, world_size=world_size, name="start")
        original(*args, **kwargs)

    return init_process_group


def _place(given: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return rank and world size if the launcher's variables decide where the ranks meet, and there are several."""
    if given.get("backend") == "fake" or given.get("store") is not None:
        return None
    if given.get("init_method") not in (None, "env://"):
        return None
    rank, world_size = (
        str(value if value >= 0 else os.environ.get(name, ""))
        for value, name in ((given.get("rank", -1), "RANK"), (given.get("world_size", -1), "WORLD_SIZE"))
    )
    # What is missing or no number is torch's to complain about.
    if not (rank.isdigit() and world_size.isdigit()) or int(world_size) < 2:
        return None
    return int(rank), int(world_size)
