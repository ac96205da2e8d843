"""`last-rank`: a rank that knows the loss reports it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    targets={
        "<0.18": "megatron.training.utils:is_last_rank",
        ">=0.18": "megatron.training.utils.common_utils:is_last_rank",
    },
    id="last-rank",
    when=Moment.U_SHAPE,
    aliases=(
        "megatron.training.utils:is_last_rank",
        "megatron.training.training:is_last_rank",
        "megatron.training.checkpointing:is_last_rank",
    ),
)
def _is_writer(session: Session, original: Callable[[], bool]) -> bool:
    """Replace `is_last_rank`: its callers want the rank that reports, which lies on the edge.

    Why: Megatron's log lines, evaluation results and progress log come from the world's last rank, a cloud rank here.

    Remove when: with `last-stage`.
    """
    return dist.get_rank() == session.planned.writer_rank
