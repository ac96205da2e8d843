"""What Megatron hands out and asks on the ranks of a U-shaped pipeline, beside training itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state, utils

from tests.multiproc.cases import Case
from tests.multiproc.train_job import applied, model_parallel
from tests.pool import init_gloo

KEYS = ("tokens", "labels", "loss_mask", "position_ids")


def batch_of_the_edge() -> dict[str, list[list[float]] | None]:
    """Share a batch inside the edge as Megatron's own script does, whose flags do not know the chunk."""
    init_gloo()
    case = Case(sizes=(2, 1), layers=(1, 1, 1))
    with applied(case, force=False), model_parallel(case):
        if parallel_state.get_pipeline_model_parallel_rank() != 0:
            return {}
        tp_rank = parallel_state.get_tensor_model_parallel_rank()
        numbers = torch.arange(6).view(2, 3)
        whole = {key: numbers + 10 * i for i, key in enumerate(KEYS)}
        whole["loss_mask"] = whole["loss_mask"].float()
        share: Callable[..., dict[str, Any]] = utils.get_batch_on_this_tp_rank
        batch = share(
            {**whole, "attention_mask": None} if tp_rank == 0 else {},
            broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
            broadcast_group=parallel_state.get_tensor_model_parallel_group(),
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            cp_size=1,
            tp_rank=tp_rank,
            micro_batch_size=2,
            seq_length=3,
            mtp_on_this_rank=False,
            pipeline_model_parallel_size=len(case.sizes),
            is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(),
            is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(),
        )
        return {key: None if batch[key] is None else batch[key].tolist() for key in KEYS}
