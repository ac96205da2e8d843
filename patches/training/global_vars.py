"""U7: TensorBoard, W&B and One Logger on the rank that reports."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return tuple(
        PatchRecord(
            id=f"U7{suffix}",
            target=f"megatron.training.global_vars:{name}",
            build=functools.partial(_on_writer, session),
            why="it compares the own rank with the world's last one, a cloud rank here, which has no loss",
            versions=">=0.19,<0.20",
            remove_when="with U1",
            optional=True,
        )
        for suffix, name in (("", "_set_tensorboard_writer"), ("b", "_set_wandb_writer"), ("c", "_set_one_logger"))
    )


def _on_writer(
    session: Session, original: Callable[[argparse.Namespace], None]
) -> Callable[[argparse.Namespace], None]:
    @functools.wraps(original)
    def set_writer(args: argparse.Namespace) -> None:
        world_size = args.world_size
        # Of a world that ends with the writer this rank is the last one, or it is none of its ranks.
        args.world_size = session.writer_rank + 1
        try:
            original(args)
        finally:
            args.world_size = world_size

    return set_writer
