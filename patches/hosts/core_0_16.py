"""Megatron 0.15 and 0.16."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from vtp_plugin.patches.hosts.grouped import GroupedHost
from vtp_plugin.patches.hosts.older import OlderHost
from vtp_plugin.undo import Name, UndoStack


class Host(OlderHost, GroupedHost):
    """Megatron 0.15 and 0.16."""

    name = "0.16"
    moved = {**OlderHost.moved, "U3": "megatron.training.utils:get_batch_on_this_tp_rank"}

    def seen_single_stage(self, options: dict[str, Any]) -> AbstractContextManager[None]:
        from megatron.training.global_vars import get_args

        # The caller has asked whether its chunk is at an end of the model, so this is the edge.
        args: Any = get_args()
        return UndoStack().during(Name(args, "pipeline_model_parallel_size"), 1)

    def default_groups(self) -> Any:
        return ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            embd=parallel_state.get_embedding_group(check_initialized=False),
            pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )
