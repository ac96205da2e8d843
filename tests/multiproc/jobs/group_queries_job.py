"""Job of test_group_queries: functions that look like Megatron's ask the groups of an unequal run."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import vtp_plugin
from tests.multiproc.cases.core_cases import Case
from tests.multiproc.jobs.core_job import Trainer, train
from tests.support.pool import TIMEOUT_S, init_gloo

# Megatron's spelling of every question.
SOURCE = """
class Asker:
    def size(self): return get_pg_size(parallel_state.get_data_parallel_group())
    def place(self): return parallel_state.get_pipeline_model_parallel_rank()
    def place_in_model(self): return dist.get_rank(parallel_state.get_model_parallel_group())
    def ranks(self):
        return [one for one in dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group())]
    def source(self):
        def inside():
            dist.broadcast(torch.ones(1), parallel_state.get_tensor_model_parallel_src_rank(),
                           group=parallel_state.get_tensor_model_parallel_group())
        inside()
    def world(self): return dist.get_world_size() + dist.get_rank()
"""


def ask(names: Sequence[str]) -> None:
    """Ask in a run of stages of two sizes."""
    init_gloo()
    vtp_plugin.apply(vtp_size_list=[1, 2], device="cpu", timeout_s=TIMEOUT_S)
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        asker = _plant()
        for name in names:
            getattr(asker, name)()
    finally:
        parallel_state.destroy_model_parallel()
        vtp_plugin.revert()


def train_and_ask(case: Case) -> None:
    """Run a job of the core grids in which a function that seems to be Megatron's asks a question."""
    with mock.patch.object(Trainer, "run", lambda self: _plant().size()):
        train(case)


def _plant() -> Any:
    """Give an object of a module that seems to be Megatron's."""
    module: Any = types.ModuleType("megatron.planted")
    vars(module).update(parallel_state=parallel_state, dist=dist, torch=torch, get_pg_size=_get_pg_size)
    exec(compile(SOURCE, __file__, "exec"), vars(module))
    return module.Asker()


def get_pg_size(group: Any) -> int:
    """Ask as the function of Megatron 0.16 and later of this name, which asks for its callers."""
    size: int = group.size()
    return size


# Megatron's own lies in a module of Megatron.
_get_pg_size = types.FunctionType(get_pg_size.__code__, {"__name__": "megatron.core.utils"}, "get_pg_size")
