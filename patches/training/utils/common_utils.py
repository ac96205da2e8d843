"""U6: a rank that knows the loss reports it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.patching import PatchRecord, wrap_with
from vtp_plugin.session import Session


def records(session: Session) -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="U6",
            targets={
                "<0.18": "megatron.training.utils:is_last_rank",
                ">=0.18": "megatron.training.utils.common_utils:is_last_rank",
            },
            build=wrap_with(_is_writer, session),
            why="Megatron's log lines, evaluation results and progress log come from the world's last rank, a cloud "
            "rank here",
            remove_when="with U1",
            aliases=(
                "megatron.training.utils:is_last_rank",
                "megatron.training.training:is_last_rank",
                "megatron.training.checkpointing:is_last_rank",
            ),
        ),
    )


def _is_writer(session: Session, original: Callable[[], bool]) -> bool:
    """Replace `is_last_rank`: its callers want the rank that reports, which lies on the edge."""
    return dist.get_rank() == session.planned.writer_rank
