"""`safe-load/arguments`: with `--use-checkpoint-args` a checkpoint is read before the list of sizes is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.command_line import asks_for_stages
from vtp_plugin.session import Session


@replaces(
    "megatron.training.checkpointing:load_args_from_checkpoint",
    id="safe-load/arguments",
    when=Moment.COMMAND_LINE,
    why="it reads a checkpoint before the records of a list apply",
    remove_when="with `safe-load`",
)
def _load_args(
    session: Session,
    original: Callable[..., Any],
    args: argparse.Namespace,
    load_arg: str = "load",
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Run `load_args_from_checkpoint`, with a list, of a checkpoint that names nothing that may run."""
    folder = getattr(args, load_arg, None)
    if folder is None or not asks_for_stages(session, args):
        return original(args, load_arg, *rest, **kwargs)
    # Not at the top: apply() imports this module, also where there is no list.
    from vtp_plugin.patches.core.dist_checkpointing.plain_objects import common_of, plain_only
    from vtp_plugin.patches.training.choose_checkpoint import loaded, own_file, require_plain_files

    session.watch_failures()
    checkpoint = loaded(session, folder, args)
    own = own_file(checkpoint, is_of_rank_0=True)
    require_plain_files(session, checkpoint, own)
    file = common_of(session, checkpoint) if own is None and checkpoint is not None else own
    with plain_only(file, f"what all ranks share in {checkpoint}"):
        return original(args, load_arg, *rest, **kwargs)
