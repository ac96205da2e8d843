"""H4f: torch knows the groups of the plugin that sum over stages with different replicas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch.distributed.distributed_c10d import _pg_map

from vtp_plugin.patching import Record, WriteRecord
from vtp_plugin.session import Session

_TABLES = ("_pg_map", "_pg_group_ranks")


def records(session: Session) -> tuple[Record, ...]:
    """Give the records of torch's tables, and let the session write them."""
    backends, members = (
        WriteRecord(
            id=f"H4f{number}",
            target=f"torch.distributed.distributed_c10d:{name}",
            why="an entry for each ModelGroup: torch asks for its backend when it reports a failed collective, and "
            "Megatron for its ranks",
            remove_when="with H4",
        )
        for number, name in enumerate(_TABLES, start=1)
    )

    session.know_group = partial(_know, backends, members)
    return backends, members


@contextmanager
def _know(
    backends: WriteRecord, members: WriteRecord, group: dist.ProcessGroup, ranks: Sequence[int], like: dist.ProcessGroup
) -> Iterator[None]:
    places = {rank: place for place, rank in enumerate(ranks)}
    with backends.during(_pg_map[like], key=group), members.during(places, key=group):
        yield
