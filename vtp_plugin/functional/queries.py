"""What the Ascend implementation's ``parallel_state_patch`` answers, answered for a run of the plugin."""

from __future__ import annotations

import torch.distributed as dist

from vtp_plugin.api import (
    current_session,
    get_vtp_intra_stage_group,
    get_vtp_my_stage_idx,
    get_vtp_size_list,
    get_vtp_stage_ranks,
    is_vtp_enabled,
    is_vtp_stage_rank0,
    open_session,
)
from vtp_plugin.functional.replicas import replicas_of

__all__ = [
    "get_edge_tp_size",
    "get_layerwise_disaggregated_training",
    "get_pipeline_model_parallel_group_alternate",
    "get_pipeline_model_parallel_group_first_to_last",
    "get_pipeline_model_parallel_group_last_to_first",
    "get_pipeline_model_parallel_next_rank",
    "get_pipeline_model_parallel_prev_rank",
    "get_vdp_size",
    "get_vtp_intra_stage_group",
    "get_vtp_my_stage_idx",
    "get_vtp_size_list",
    "get_vtp_stage_ranks",
    "is_vdp_enabled",
    "is_vtp_enabled",
    "is_vtp_stage_rank0",
    "pipeline_groups",
]


def pipeline_groups() -> list[dist.ProcessGroup]:
    """Return this rank's pipeline group in every replica of the pipeline that this rank works in.

    That is one group, but more on a stage that has fewer replicas than another: two on stage 0 of
    ``--vtp-dp-list 1,2``.

    Raises:
        MissingError: the channels are not open.
    """
    return list(open_session().running.pipeline_groups)


def get_pipeline_model_parallel_next_rank() -> int | list[int]:
    """Return the leader of the next stage, after the last stage that of the first; a list if there are several.

    Raises:
        MissingError: the channels are not open.
    """
    return _one_or_all([one.next_ranks[0] for one in replicas_of(open_session())])


def get_pipeline_model_parallel_prev_rank() -> int | list[int]:
    """Return the leader of the previous stage, before the first that of the last; as the query of the next one."""
    return _one_or_all([one.prev_ranks[0] for one in replicas_of(open_session())])


def get_pipeline_model_parallel_group_alternate() -> dist.ProcessGroup | list[dist.ProcessGroup]:
    """Return what chooses a replica: the pipeline group, or all; no second group is needed to keep directions apart.

    Raises:
        MissingError: the channels are not open.
    """
    groups = pipeline_groups()
    return groups[0] if len(groups) == 1 else groups


get_pipeline_model_parallel_group_first_to_last = get_pipeline_model_parallel_group_alternate
get_pipeline_model_parallel_group_last_to_first = get_pipeline_model_parallel_group_alternate


def get_edge_tp_size() -> int:
    """Return the tensor-parallel size of the first stage; 1 before it is known."""
    sizes = get_vtp_size_list()
    return sizes[0] if sizes else 1


def get_layerwise_disaggregated_training() -> bool:
    """Tell whether the pipeline is U-shaped."""
    session = current_session()
    return session is not None and session.config.layerwise_disaggregated


def get_vdp_size() -> int:
    """Return the largest data-parallel size of a stage, that of the cloud; 1 before it is known."""
    session = current_session()
    return max(session.planned.layout.dp_sizes) if session is not None and session.is_planned else 1


def is_vdp_enabled() -> bool:
    """Tell whether stages differ in their data-parallel sizes."""
    session = current_session()
    return session is not None and session.is_planned and not session.planned.replicas.is_equal


def _one_or_all(ranks: list[int]) -> int | list[int]:
    return ranks[0] if len(ranks) == 1 else ranks
