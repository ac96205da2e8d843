"""`safe-load/common-file`: what all ranks share of a checkpoint is read without running anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.core.dist_checkpointing.serialization import plain_only
from vtp_plugin.patches.patch_set import Moment

_MODULE = "megatron.core.dist_checkpointing.strategies.common"


@replaces(
    id="safe-load/common-file",
    targets={
        "<0.17": f"{_MODULE}:TorchCommonLoadStrategy.load_common",
        ">=0.17": f"{_MODULE}:load_common",
    },
    when=Moment.LIST,
    remove_when="with 0.12, if Megatron then names the file",
)
def _load_common(original: Callable[..., Any], *args: Any) -> Any:
    """Run `load_common` for plain values.

    Why: Megatron 0.12 asks torch to make whatever the file names; later ones end with a traceback that names no file.
    """
    folder = str(args[-1])
    if "://" in folder:
        return original(*args)
    file = Path(folder) / COMMON_FILE
    with plain_only(file, str(file)):
        return original(*args)
