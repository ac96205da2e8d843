"""Gives a run start weights that follow from names and whole shapes only, and notes the gradients of its first step.

So all layouts start from the same whole weights, as if they had loaded one checkpoint, without one.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import megatron.training.training as training
import torch
from megatron.core import parallel_state
from megatron.training import get_args

from tests.multiproc.hooks.in_place import Facts, around
from tests.multiproc.hooks.optimizer_dump import whole_parts


def note_gradients(facts: Facts) -> None:
    """Set all weights before the first step, and note gradients in it: summed over replicas, not yet clipped."""

    @around(training, "train_step")
    def train_step(original: Any, step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if "gradients" in facts:
            return original(step, data, model, optimizer, *args, **kwargs)
        facts["gradients"] = []
        for _, parameter, cut in _parts(model):
            parameter.data.copy_(_part(cut.pop("whole"), **cut))
        optimizer.reload_model_params()
        real = optimizer.step

        def noted_step() -> Any:
            facts["gradients"] += [] if get_args().use_distributed_optimizer else _gradients(model)
            return real()

        optimizer.step = noted_step
        try:
            return original(step, data, model, optimizer, *args, **kwargs)
        finally:
            optimizer.step = real


def _parts(model: list[Any]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield parameters with their names in the whole model, and what part of which whole weight this rank has."""
    for chunk in model:
        for name, parameter, cut in whole_parts(chunk):
            shape = list(cut["shape"])
            if cut["axis"] is not None:
                shape[cut["axis"]] *= cut["tp"][1]
            yield name, parameter, {**cut, "whole": _draw(name, shape)}


def _draw(name: str, shape: list[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(shape, generator=generator, device="cpu") * 0.1
    return drawn + 1 if "norm" in name and name.endswith("weight") else drawn


def _part(whole: torch.Tensor, *, tp: tuple[int, int], axis: int | None, is_gated: bool, shape: Any) -> torch.Tensor:
    if axis is None:
        return whole
    rank, size = tp
    return torch.cat([half.chunk(size, axis)[rank] for half in whole.chunk(1 + is_gated, axis)], axis)


def _gradients(model: list[Any]) -> list[dict[str, Any]]:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return [
        {"name": name, "stage": stage, **{key: cut[key] for key in ("tp", "axis", "is_gated")}, "values": values}
        for name, parameter, cut in _parts(model)
        if (gradient := getattr(parameter, "main_grad", None)) is not None
        and (values := gradient.detach().float().cpu().clone().numpy()) is not None
    ]
