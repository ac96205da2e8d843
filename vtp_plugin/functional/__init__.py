"""Send and receive functions for training steps written by hand, with the interface of the Ascend implementation.

Names, arguments and returns follow ``layerwise_disaggregated_training/p2p_communication_patch.py`` of MindSpeed-MM, the
queries ``parallel_state_patch.py`` beside it: code written for it only changes its import or, after :func:`install`,
not even that. Below run the same channels as in every other step, so any transport, any sizes, sequence parallelism and
variable lengths work.

All tensor-parallel ranks of a stage must call the same function at the same program point, and must wait for the
receives of a channel in the order of their calls. A call that has nothing to send or receive, by the rules of each
function, does not communicate.

``group``, ``next_rank`` and ``prev_rank``, each one or a list, only choose replicas of the pipeline, since every
direction of every boundary has its channel. A group is one of :func:`pipeline_groups`; a rank is the leader of the next
or previous stage in such a replica. Given together they must name the same replicas, in the same order. All may be left
out where there is only one replica. Several send one tensor to each, and receive the mean of what each sends.

With variable lengths every receive waits for the sender's header, even if it does not wait for the tensor. These
functions do not coalesce messages, whatever ``batch_p2p_comm`` says.

Words:
    handle: what a call returns that did not wait; wait for it once.
    implementation: the Ascend one, whose interface this is.
    joint: a handle of what several replicas send, of which it gives the mean (``_Joint``).
"""

from __future__ import annotations

from vtp_plugin.functional.handles import (
    get_edge_tp_size,
    get_layerwise_disaggregated_training,
    get_pipeline_model_parallel_group_alternate,
    get_pipeline_model_parallel_group_first_to_last,
    get_pipeline_model_parallel_group_last_to_first,
    get_pipeline_model_parallel_next_rank,
    get_pipeline_model_parallel_prev_rank,
    get_vdp_size,
    get_vtp_intra_stage_group,
    get_vtp_my_stage_idx,
    get_vtp_size_list,
    get_vtp_stage_ranks,
    is_vdp_enabled,
    is_vtp_enabled,
    is_vtp_stage_rank0,
    pipeline_groups,
)
from vtp_plugin.functional.p2p import (
    _communicate_impl,
    _VTPRecvWork,
    _VTPSendWork,
    recv_backward_with_reqs,
    recv_forward_with_reqs,
    send_backward,
    send_forward,
    vtp_recv_backward,
    vtp_recv_forward,
    vtp_send_backward,
    vtp_send_forward,
)
from vtp_plugin.functional.stand_in import install

__all__ = [
    "_VTPRecvWork",
    "_VTPSendWork",
    "_communicate_impl",
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
    "install",
    "is_vdp_enabled",
    "is_vtp_enabled",
    "is_vtp_stage_rank0",
    "pipeline_groups",
    "recv_backward_with_reqs",
    "recv_forward_with_reqs",
    "send_backward",
    "send_forward",
    "vtp_recv_backward",
    "vtp_recv_forward",
    "vtp_send_backward",
    "vtp_send_forward",
]
