"""`atomic-checkpoint`: pieces of a checkpoint are hashed while they are written, and synced to their last byte."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async

from vtp_plugin.checkpoint.format.index import Extent, Hashing
from vtp_plugin.checkpoint.save.atomic_dir import InParts
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.health.failure_hook import ending_with_writers
from vtp_plugin.session import Session
from vtp_plugin.util.undo import Name, UndoStack

_CLASS = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
# An attribute of what a rank tells of a piece: the process that writes has no other way to rank 0.
_DIGEST = "vtp_digest"
# Whether each file is written by a process of its own.
_FORKS = hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multiproc")


@replaces(
    f"{_CLASS}.get_save_function_and_args",
    id="atomic-checkpoint/pieces",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _make_function(session: Session, original: Callable[[Any], Sequence[Any]], writer: Any) -> tuple[Any, ...]:
    """Run `get_save_function_and_args`, and put around the function what it lacks.

    Why: its function syncs a file whose last bytes are still in Python's buffer, and keeps no hash; with a worker that
    stays, tensors of CPUs are shared with it, and the run keeps changing them while it writes; up to 0.16 it waits for
    ever for a process that writes and was killed.
    """
    if session.savings.copies_tensors and writer.write_buckets:
        writer.write_buckets = [
            (path, name, (objects, [(item, _copy(tensor)) for item, tensor in tensors]))
            for path, name, (objects, tensors) in writer.write_buckets
        ]
    function, *rest = original(writer)
    return (None if function is None else functools.partial(write_hashed, function, os.getpid()), *rest)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.device.type == "cpu" else tensor


def write_hashed(function: Callable[..., None], rank_process: int, *args: Any, **kwargs: Any) -> None:
    """Write files as Megatron does, with the hash of each piece; a newly started process calls it, too."""
    write = _hashing(filesystem_async._write_item)
    watched = ending_with_writers(rank_process) if _FORKS else contextlib.nullcontext()
    with watched, UndoStack().during(Name(filesystem_async, "_write_item"), write):
        function(*args, **kwargs)


def _hashing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)  # Megatron asks for its parameters
    def write(*args: Any, **kwargs: Any) -> Any:
        # Older torches have no transforms before the stream.
        place = next(number for number, each in enumerate(args) if hasattr(each, "fileno"))
        hashing = Hashing()
        stream = InParts(args[place], hashing.update)
        result = original(*args[:place], stream, *args[place + 1 :], **kwargs)
        args[place].flush()  # what is in Python's buffer is not synced
        setattr(result.storage_data, _DIGEST, str(hashing))
        return result

    return write


@replaces(
    f"{_CLASS}.finish",
    id="atomic-checkpoint/hashes",
    when=Moment.LIST,
    remove_when="with `atomic-checkpoint`",
)
def _finish(session: Session, original: Callable[..., None], writer: Any, metadata: Any, results: Any) -> None:
    """Take the hashes for the manifest, then run `finish`.

    Why: rank 0 gets what all ranks tell of their pieces, and with it the hashes.
    """
    saving = session.savings.find(writer.path)
    for info in (result.storage_data for of_rank in results for result in of_rank):
        digest = vars(info).pop(_DIGEST, None)
        if saving is not None and digest is not None and saving.partial == writer.path:
            saving.digests[Extent(info.relative_path, info.offset, info.length)] = digest
    original(writer, metadata, results)
