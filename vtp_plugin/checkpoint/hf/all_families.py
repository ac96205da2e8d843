"""The families that are known."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from vtp_plugin.checkpoint.hf.families.llama import LLAMA
from vtp_plugin.checkpoint.hf.families.mistral import MISTRAL
from vtp_plugin.checkpoint.hf.families.mixtral import MIXTRAL
from vtp_plugin.checkpoint.hf.families.qwen2 import QWEN2
from vtp_plugin.checkpoint.hf.families.qwen2_5_vl import QWEN2_5_VL
from vtp_plugin.checkpoint.hf.families.qwen3 import QWEN3
from vtp_plugin.checkpoint.hf.families.qwen3_moe import QWEN3_MOE
from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.tensor_rows import TensorRow
from vtp_plugin.plan.model.gpt_model import OUTPUT

FUSED_NAME: Final = ".mlp.experts.gate_up_proj"
"""How the name of a tensor ends that holds all experts of a layer."""
FAMILIES: Final = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN2_5_VL, QWEN3, QWEN3_MOE, MIXTRAL)
}
"""By ``model_type``."""


def rows_of(model: HFModel) -> tuple[TensorRow, ...]:
    """Return the rows of a model: where its output layer is the embedding, it has none of its own."""
    return tuple(row for row in FAMILIES[model.family].rows if not (row.parameter is OUTPUT and model.is_tied))


def rows_in_file(model: HFModel, names: Collection[str]) -> tuple[TensorRow, ...]:
    """Return the rows of a model as its files have them: with experts one by one, or fused.

    Args:
        model: the published model.
        names: names of the tensors in its files.
    """
    fused = {row.megatron_keys[0]: row for row in FAMILIES[model.family].fused}
    if not any(name.endswith(FUSED_NAME) for name in names):
        return rows_of(model)
    return tuple(fused.get(row.megatron_keys[0], row) for row in rows_of(model))
