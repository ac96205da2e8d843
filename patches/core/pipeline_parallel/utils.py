"""`last-stage`: where the model ends in a U-shaped pipeline."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.session import Session


@replaces(
    "megatron.core.pipeline_parallel.utils:is_pp_last_stage",
    id="last-stage",
    when=Moment.U_SHAPE,
    unneeded={"<0.13": "all ask megatron.core.parallel_state:is_pipeline_last_stage, which `last-stage/chunk` carries"},
    aliases=(
        "megatron.core.models.common.language_module.language_module:is_pp_last_stage",
        "megatron.core.pipeline_parallel.p2p_communication:is_pp_last_stage",
        "megatron.core.pipeline_parallel.schedules:is_pp_last_stage",
        "megatron.training.training:is_pp_last_stage",
        "megatron.training.models.gpt:is_pp_last_stage",
    ),
)
def _is_last(session: Session, original: Callable[..., bool], pp_group: dist.ProcessGroup) -> bool:
    """Replace `is_pp_last_stage`: the model ends on the stage with the loss, which is the first in a U.

    Why: all that depends on the end of the model asks here: who builds the head, who turns its output into fp32, who
    averages and reports the loss.

    Remove when: Megatron has a placement of chunks that ends on another stage than the last.
    """
    return dist.get_rank(pp_group) == session.planned.loss_stage
