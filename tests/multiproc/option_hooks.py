"""What scripts larger than the example do, for options that need it: attention masks, and timers of stragglers."""

from __future__ import annotations

from typing import Any

import megatron.training.training as training
import torch
from megatron.core import tensor_parallel
from megatron.core.datasets import gpt_dataset
from megatron.core.models.gpt import GPTModel
from megatron.core.utils import StragglerDetector


def build_masks(facts: dict[str, Any]) -> None:
    """Have the data set build attention masks, and the model's layers use them. A row has several documents."""
    gpt_dataset.MockGPTLowLevelDataset.max_sequence_length = 8
    check, forward = gpt_dataset.GPTDatasetConfig.__post_init__, GPTModel.forward
    broadcast = tensor_parallel.broadcast_data
    masks: list[torch.Tensor] = []

    def with_masks(self: Any) -> None:
        self.create_attention_mask = True
        check(self)

    def broadcast_data(keys: list[str], data: Any, dtype: torch.dtype) -> Any:
        if "tokens" in keys:
            numbers = None if data is None else {"attention_mask": data["attention_mask"].long()}
            masks[:] = [broadcast(["attention_mask"], numbers, torch.int64)["attention_mask"].bool()]
        return broadcast(keys, data, dtype)

    def with_mask(self: Any, tokens: Any, positions: Any, _mask: None, **kwargs: Any) -> Any:
        return forward(self, tokens, positions, masks[0], **kwargs)

    gpt_dataset.GPTDatasetConfig.__post_init__ = with_masks
    tensor_parallel.broadcast_data = broadcast_data
    GPTModel.forward = with_mask


def time_stragglers(facts: dict[str, Any]) -> None:
    """Time the model's forward pass, and note which ranks Megatron compares, on rank 0."""
    detector, forward, compare = StragglerDetector(), GPTModel.forward, StragglerDetector._min_max
    facts["stragglers"] = []

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with detector:
            return forward(self, *args, **kwargs)

    def noted(self: Any, *numbers: float) -> Any:
        found = compare(self, *numbers)
        if found is not None and self.rank == 0:
            facts["stragglers"].append(sorted(entry()[1] for entry in found.aflops))
        return found

    GPTModel.forward, StragglerDetector._min_max = timed, noted


def note_params_norms(facts: dict[str, Any]) -> None:
    """Note the norms of all weights that Megatron logs, at full precision."""
    facts["params_norms"] = []
    original = training.calc_params_l2_norm

    def calc_params_l2_norm(*args: Any, **options: Any) -> float:
        norm: float = original(*args, **options)
        facts["params_norms"].append(norm)
        return norm

    training.calc_params_l2_norm = calc_params_l2_norm
