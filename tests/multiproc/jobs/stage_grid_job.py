"""A job that moves known tensors between the stages of two modules in one world."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.distributed_c10d import _pg_map

import vtp_plugin
from tests.support.pool import TIMEOUT_S, init_gloo

Stages = tuple[tuple[int, int, int], ...]


def cross(modules: tuple[Stages, ...], num_microbatches: int) -> list[str]:
    """Send activations down both modules and gradients up; return what went wrong on this rank.

    Args:
        modules: tp, cp and dp of every stage; the ranks of one module follow those of the other.
        num_microbatches: each of another shape.
    """
    init_gloo()
    vtp_plugin.apply(device="cpu", bridges=True, timeout_s=TIMEOUT_S)
    try:
        problems = _cross(modules, num_microbatches)
        gc.collect()
        left = [group.group_desc for group in _pg_map]
        return problems + ([f"left are {left}"] if left != ["default_pg"] else [])
    finally:
        vtp_plugin.revert()


def _cross(modules: tuple[Stages, ...], num_microbatches: int) -> list[str]:
    from vtp_plugin.bridge import StageCommGrid

    grids: list[Any] = []
    for stages in modules:
        grids.append(StageCommGrid(stages, sum(grid.size for grid in grids)))
    # All open their groups before any of them communicates.
    for grid in grids:
        grid.create_pg("tp")
        grid.create_pg("pp")
    (number,) = (number for number, grid in enumerate(grids) if grid.is_current_rank_in_grid())
    problems = _of_module(grids[number], number, num_microbatches)
    for grid in grids:
        grid.destroy()
    return problems


def _of_module(grid: Any, number: int, num_microbatches: int) -> list[str]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    tp, _, _, num_stages = grid.shape
    config = TransformerConfig(
        num_layers=num_stages,
        hidden_size=4,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=num_stages,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default is refused with variable lengths, experts or not
        batch_p2p_comm=False,
    )
    communicator = P2PCommunicator(grid.get_pg("pp"), config)
    stage = grid.layout.stage_of(dist.get_rank())
    is_first, is_last = stage == 0, stage == num_stages - 1
    problems: list[str] = []

    def check(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if got.shape != wanted.shape or not torch.equal(got.detach(), wanted):
            problems.append(f"rank {dist.get_rank()}: {what}: {tuple(got.shape)} {got.flatten()[:4].tolist()}")

    for way in ("forward", "backward"):
        for microbatch in range(num_microbatches):
            wanted = _tensor(number, microbatch, way)
            shape = tuple(wanted.shape)
            if way == "forward":
                if not is_first:
                    check(f"{way} {microbatch}", communicator.recv_forward(shape, is_first), wanted + stage)
                communicator.send_forward(wanted + stage + 1, is_last)
            else:
                if not is_last:
                    check(f"{way} {microbatch}", communicator.recv_backward(shape, is_last), wanted + stage)
                communicator.send_backward(wanted + stage - 1, is_first)
    return problems


def _tensor(module: int, microbatch: int, way: str) -> torch.Tensor:
    """Return what crosses, before the stage's number is added."""
    first = 1000 * module + 100 * microbatch + 10000 * (way == "backward")
    return first + torch.arange(4.0 * (4 + module) * (1 + microbatch)).view(4 + module, 1 + microbatch, 4)
