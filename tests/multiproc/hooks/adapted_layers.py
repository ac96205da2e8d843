"""Adapters (LoRA) in a script's model: the base is frozen, and each linear layer gets two small ones beside it.

Named and cut as PEFT's are (``tests/multiproc/jobs/split_job.py``), but they say how they are stored; PEFT's do not.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from megatron.core.models.gpt import gpt_model
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from tests.multiproc.hooks.in_place import Facts, after

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK = 16


class Adapted(torch.nn.Module):
    """A linear layer with an adapter; the half of it on the side where the layer is cut is cut, too.

    Args:
        base: Megatron's layer.
        config: of the model.
    """

    def __init__(self, base: Any, config: Any) -> None:
        super().__init__()
        rows, columns = base.weight.shape
        options: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": False}
        self.is_cut_in_rows = isinstance(base, ColumnParallelLinear)
        if self.is_cut_in_rows:
            down: Any = torch.nn.Linear(columns, RANK, bias=False)
            up: Any = ColumnParallelLinear(RANK, base.output_size, gather_output=False, **options)
        else:
            down = RowParallelLinear(base.input_size, RANK, input_is_parallel=True, skip_bias_add=False, **options)
            up = torch.nn.Linear(RANK, rows, bias=False)
        self.base_layer, self.lora_A, self.lora_B = base, down, up

    def forward(self, values: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute what the layer gives, and add what the adapter does."""
        output, bias = self.base_layer(values, *args, **kwargs)
        small = self.lora_A(values)
        small = self.lora_B(small if self.is_cut_in_rows else small[0])
        return output + (small[0] if self.is_cut_in_rows else small), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Say how all three are stored."""
        found: dict[str, Any] = {}
        children: dict[str, Any] = dict(self.named_children())
        for name, layer in children.items():
            before = f"{prefix}{name}."
            if hasattr(layer, "sharded_state_dict"):
                found |= layer.sharded_state_dict(before, sharded_offsets, metadata)
            else:
                state = layer.state_dict(prefix="", keep_vars=True)
                found |= make_sharded_tensors_for_checkpoint(state, before, {}, sharded_offsets)
        return found


def add_adapters(facts: Facts) -> None:
    """Give every model of the script adapters, and freeze the rest."""

    @after(gpt_model.GPTModel, "__init__")
    def adapt(_none: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
        self.requires_grad_(False)
        for module in list(self.modules()):
            for name in TARGETS:
                if isinstance(layer := getattr(module, name, None), ColumnParallelLinear | RowParallelLinear):
                    setattr(module, name, Adapted(layer, self.config))
        for name, parameter in self.named_parameters():
            if ".lora_" in name:
                # Replicas and copies on other ranks of a stage are the same; the parts of a cut one are alike, too.
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / RANK)
