"""Which sizes the run had that wrote a checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vtp_plugin.patches.training.choose_checkpoint import stored_experts

STAGES = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("stored", "sizes"),
    [
        # Megatron's, with experts cut as the rest, and in another way.
        ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}, ((1, 1), (2, 2))),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2},
            ((2, 2), (1, 1)),
        ),
        ({"tensor_model_parallel_size": 2}, ((1, 1), (2, 2))),
        # The plugin's, before it stored sizes of experts: rank 0 has written those of its own stage.
        ({"vtp_size_list": [1, 2], "expert_tensor_parallel_size": 1}, ((1, 1), (1, 2))),
        ({"vtp_size_list": [1, 2], "vtp_ep_list": [1, 2], "vtp_etp_list": [1, 1]}, ((1, 2), (1, 1))),
    ],
)
def test_sizes_of_experts(stored: dict[str, Any], sizes: tuple[tuple[int, ...], ...]) -> None:
    assert stored_experts(SimpleNamespace(**STAGES, **stored)) == sizes
