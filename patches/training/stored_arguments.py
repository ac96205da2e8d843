"""`safe-load/arguments`: with `--use-checkpoint-args` a checkpoint is read before the list of sizes is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from vtp_plugin.checkpoint.format.checkpoint_files import broken_file
from vtp_plugin.checkpoint.format.resolver import RELEASE, asked_by
from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.patches.training.command_line import asks_for_stages
from vtp_plugin.session import Session
from vtp_plugin.util.undo import replaced


@replaces(
    "megatron.training.checkpointing:load_args_from_checkpoint", id="safe-load/arguments", when=Moment.COMMAND_LINE
)
def _load_args(
    session: Session,
    original: Callable[..., Any],
    args: argparse.Namespace,
    load_arg: str = "load",
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Run `load_args_from_checkpoint`, with a list, of a checkpoint that names nothing that may run.

    Why: it reads a checkpoint before the records of a list apply.

    Remove when: with `safe-load`.
    """
    folder = getattr(args, load_arg, None)
    if folder is None or not asks_for_stages(session, args):
        return original(args, load_arg, *rest, **kwargs)
    # Not at the top: apply() imports this module, also where there is no list.
    from vtp_plugin.patches.core.dist_checkpointing.serialization import common_of, plain_only
    from vtp_plugin.patches.training.choose_checkpoint import own_file, require_plain_files

    session.watch_failures()
    asked = asked_by(args, folder)
    found, step, kind = asked.resolve(), asked.step, asked.kind
    if session.config.load_newest_valid or getattr(args, "vtp_load_newest_valid", None):
        # Of these, all bytes are read when the ranks know each other.
        found = next((each for each in asked.candidates() if broken_file(each.checkpoint) is None), found)
        if found is not None:
            folder, kind, step = str(found.folder), None, None if found.name == RELEASE else int(found.name)
    checkpoint = None if found is None else found.checkpoint
    own = own_file(checkpoint, is_of_rank_0=True)
    require_plain_files(session, checkpoint, own)
    file = common_of(session, checkpoint) if own is None and checkpoint is not None else own
    looks = {load_arg: folder, "ckpt_step": step, "non_persistent_ckpt_type": kind}
    with replaced(args, **looks), plain_only(file, f"what all ranks share in {checkpoint}"):
        return original(args, load_arg, *rest, **kwargs)
