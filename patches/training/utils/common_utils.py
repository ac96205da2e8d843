"""U6: the rank that reports is one that knows the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.patching import PatchRecord
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="U6",
            target="megatron.training.utils.common_utils:is_last_rank",
            build=functools.partial(_is_writer, session),
            why="Megatron's log lines, evaluation results and progress log come from the world's last rank, a cloud "
            "rank here",
            versions=">=0.19,<0.20",
            remove_when="with U1",
            aliases=(
                "megatron.training.utils:is_last_rank",
                "megatron.training.training:is_last_rank",
                "megatron.training.checkpointing:is_last_rank",
            ),
        ),
    )


def _is_writer(session: Session, original: Callable[[], bool]) -> Callable[[], bool]:
    @functools.wraps(original)
    def is_last_rank() -> bool:
        return dist.get_rank() == session.planned.writer_rank

    return is_last_rank
