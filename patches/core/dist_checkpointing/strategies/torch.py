"""`hashed-reads`: pieces of a checkpoint are compared with their hashes when they are read.

`safe-load/planner`: nothing in them runs.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.index import Extent, load_manifest, refused
from vtp_plugin.checkpoint.save.atomic_dir import PieceChecks
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.serialization import plain_only
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session

_WHY = "torch reads a piece without looking whether a byte has changed, and Megatron loads it"
_GONE = "torch compares what it reads with a hash"


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
    id="hashed-reads",
    when=Moment.LIST,
    why=_WHY,
    remove_when=_GONE,
    unneeded={"<0.15": "`hashed-reads/reader-class` stands for it"},
)
def _make_reader(session: Session, original: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_get_filesystem_reader`; what it gives checks what it reads."""
    reader = original(folder, *args, **kwargs)
    if "://" in str(folder):
        return reader
    # Megatron chooses its class by the folder, so it is there before its subclass.
    made = object.__new__(checking(type(reader), session))
    vars(made).update(vars(reader))
    return made


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch:MCoreLoadPlanner.load_bytes",
    id="safe-load/planner",
    when=Moment.LIST,
    remove_when="torch asks for plain values there",
)
def _load_bytes(original: Callable[..., None], planner: Any, read_item: Any, value: Any) -> None:
    """Run `load_bytes` for plain objects only.

    Why: torch's planner, its base, asks torch to make whatever an object of a checkpoint names.
    """
    with plain_only(value, f"{read_item.dest_index.fqn}, an object of the checkpoint,"):
        original(planner, read_item, value)


def checking(reader_class: type[Any], session: Session) -> type[Any]:
    """Return the class of a reader of torch that checks each piece that it reads, if the checkpoint has a manifest."""

    class Checking(reader_class):
        vtp_checks: PieceChecks | None = None
        vtp_path: Any = None

        def read_data(self, plan: Any, planner: Any) -> Any:
            if self.vtp_path != self.path:  # however often it is asked for pieces of one checkpoint
                self.vtp_path, self.vtp_checks = self.path, _checks_of(Path(self.path), session)
            try:
                with self.vtp_checks or contextlib.nullcontext():
                    return super().read_data(plan, planner)
            except pickle.UnpicklingError as error:
                raise refused(f"a tensor in {self.path}", error) from None

        def _slice_file(self, file: Any, info: Any) -> Any:
            part = super()._slice_file(file, info)
            if self.vtp_checks is None:
                return part
            return self.vtp_checks.watch(part, Extent(info.relative_path, info.offset, info.length))

    return Checking


def _checks_of(checkpoint: Path, session: Session) -> PieceChecks | None:
    manifest = load_manifest(checkpoint)
    if manifest is None or not manifest.can_check:
        return None
    return PieceChecks(checkpoint, manifest, session.loading.way_out)
