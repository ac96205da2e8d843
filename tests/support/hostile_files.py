"""Files of checkpoints that make a folder when they are unpickled, each in the place of one that Megatron wrote."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from vtp_plugin.checkpoint.format.index import MANIFEST, dump_manifest, make_manifest

NAME = "posix.mkdir"
"""What they name."""


class Hostile:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._marker),)


def is_there(checkpoint: Path, name: str) -> bool:
    """Tell whether a checkpoint has what :func:`spoil` takes by that name."""
    if name.startswith("object "):
        return name.partition(" ")[2].encode() in (checkpoint / ".metadata").read_bytes()
    return name == "tensor" or any(checkpoint.glob(name))


def spoil(checkpoint: Path, name: str, marker: Path) -> None:
    """Put something hostile into a file of a checkpoint, so that its hashes are right.

    Args:
        checkpoint: its folder.
        name: ``.metadata``, a pattern of archives such as ``mp_rank_*/model_optim_rng.pt``, ``object PREFIX`` for an
            object in a shard, or ``tensor`` for one.
        marker: the folder that is made.
    """
    if name == ".metadata":
        _change_index(checkpoint, lambda index: setattr(index, "planner_data", Hostile(marker)))
    elif name.startswith("object"):
        prefix = name.partition(" ")[2]
        _change_index(checkpoint, lambda index: _move(checkpoint, index, prefix, [Hostile(marker)], is_object=True))
    elif name == "tensor":
        _change_index(checkpoint, lambda index: _move(checkpoint, index, "decoder", Hostile(marker)))
    else:
        files = sorted(checkpoint.glob(name))
        assert files
        for file in files:
            state = torch.load(file, weights_only=False) if file.is_file() else {}
            torch.save({**state, "more": Hostile(marker)}, file)
    if (checkpoint / MANIFEST).exists():
        (checkpoint / MANIFEST).write_text(dump_manifest(make_manifest(checkpoint)))


def _change_index(checkpoint: Path, change: Callable[[Any], None]) -> None:
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(index)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(index))


def _move(checkpoint: Path, index: Any, prefix: str, value: Any, *, is_object: bool = False) -> None:
    """Let everything whose key begins so lie behind the end of a shard, as another value."""
    found = [key for key in index.storage_data if key.fqn.startswith(prefix) and (key.offset is None) == is_object]
    assert found, prefix
    for key in found:
        place: _StorageInfo = index.storage_data[key]
        file = checkpoint / place.relative_path
        written = io.BytesIO()
        torch.save(value, written)
        offset = file.stat().st_size
        with file.open("ab") as shard:
            shard.write(written.getvalue())
        index.storage_data[key] = replace(place, offset=offset, length=len(written.getvalue()))
