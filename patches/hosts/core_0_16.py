"""Megatron 0.15 and 0.16."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_type

from vtp_plugin.patches.hosts.fused_kernels import kernels_record
from vtp_plugin.patches.hosts.grouped import GroupedHost
from vtp_plugin.patches.hosts.seen_torch import SeenTorch
from vtp_plugin.patching import PatchRecord

_BUILDERS = "the tokenizer alone pads the vocabulary; model builders take what it says"
_MODELS = "models are built by megatron.training.training:get_model alone, which U5 carries"


class Host(GroupedHost):
    """Megatron 0.15 and 0.16."""

    name = "0.16"
    needs_device_first = True
    moved = {
        "H3": "megatron.training.tokenizer.tokenizer:_vocab_size_with_padding",
        "U3": "megatron.training.utils:get_batch_on_this_tp_rank",
        "U6": "megatron.training.utils:is_last_rank",
    }
    absent = {"H3b": _BUILDERS, "U4": _MODELS}

    def cpu_records(self) -> tuple[PatchRecord, ...]:
        return (kernels_record(),)

    def backward_step(
        self,
        model: Any,
        activation: torch.Tensor | None,
        output: torch.Tensor,
        gradient: torch.Tensor | None,
        config: Any,
    ) -> torch.Tensor | None:
        step: Callable[..., Any] = schedules.backward_step  # the newest family's types lack the model's
        return step(activation, output, gradient, get_model_type(model), config)

    def default_groups(self) -> Any:
        return ProcessGroupCollection(
            tp=parallel_state.get_tensor_model_parallel_group(),
            cp=parallel_state.get_context_parallel_group(),
            pp=parallel_state.get_pipeline_model_parallel_group(),
            embd=parallel_state.get_embedding_group(check_initialized=False),
            pos_embd=parallel_state.get_position_embedding_group(check_initialized=False),
            dp_cp=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )

    def seen_world(
        self, options: dict[str, Any], world_size: int, put_torch: Callable[[object], AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        return put_torch(SeenTorch(world_size))
