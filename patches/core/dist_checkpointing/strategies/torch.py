"""H23: pieces of a checkpoint are compared with their hashes when they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.archive import Extent
from vtp_plugin.checkpoint.checking import PieceChecks
from vtp_plugin.checkpoint.manifest import Manifest, load_manifest
from vtp_plugin.patches.moment import Moment
from vtp_plugin.patching import replaces

_WHY = "torch reads a piece without looking whether a byte has changed, and Megatron loads it"
_GONE = "torch compares what it reads with a hash"


@replaces(
    "megatron.core.dist_checkpointing.strategies.torch:_get_filesystem_reader",
    id="H23",
    when=Moment.LIST,
    why=_WHY,
    remove_when=_GONE,
    unneeded={"<0.15": "H23a stands for it"},
)
def _make_reader(original: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `_get_filesystem_reader`; what it gives checks what it reads."""
    return checked(original(folder, *args, **kwargs), folder)


def checked(reader: Any, folder: Any) -> Any:
    """Return a reader as torch's that checks each piece that it reads, if the checkpoint has a manifest."""
    manifest = None if "://" in str(folder) else load_manifest(Path(folder))
    if manifest is None or not manifest.can_check:
        return reader
    made = object.__new__(_checking(type(reader), Path(folder), manifest))
    vars(made).update(vars(reader))
    return made


def _checking(reader_class: Any, folder: Path, manifest: Manifest) -> Any:
    """Return the class of a reader of torch that checks each piece that it reads."""

    class Checking(reader_class):
        def read_data(self, plan: Any, planner: Any) -> Any:
            with PieceChecks(folder, manifest) as self.vtp_checks:
                return super().read_data(plan, planner)

        def _slice_file(self, file: Any, info: Any) -> Any:
            self.vtp_checks.begin(Extent(info.relative_path, info.offset, info.length))
            return super()._slice_file(file, info)

    return Checking
