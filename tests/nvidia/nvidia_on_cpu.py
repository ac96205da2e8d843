"""A pytest plugin that lets NVIDIA's own tests of grids and bridges run on CPU, with the plugin's bridges or without.

Their tests ask for NCCL; here every group is of gloo. Without `VTP_BRIDGES` in the environment Megatron's own bridges
stay.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import gpt_layer_specs

import vtp_plugin
from vtp_plugin.api import choose_device

_TAKE_BACKEND = ("init_process_group", "new_group", "new_subgroups_by_enumeration", "new_subgroups")


def _on_gloo(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if isinstance(one, str) and "nccl" in one else one for one in args)
        if isinstance(kwargs.get("backend"), str) and "nccl" in kwargs["backend"]:
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)
        return function(*args, **kwargs)

    return call


for _name in _TAKE_BACKEND:
    _mapped = _on_gloo(getattr(dist, _name))
    setattr(dist, _name, _mapped)
    setattr(dist.distributed_c10d, _name, _mapped)

if os.environ.get("VTP_BRIDGES", ""):
    vtp_plugin.apply(device="cpu", bridges=True)
else:
    choose_device("cpu")

# Without Transformer Engine there is no specification of its layers.
gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = gpt_layer_specs.get_gpt_layer_local_spec


def pytest_runtest_logreport(report: Any) -> None:
    """Show a failure at once: while the other ranks wait for this one, the end of its session does not come."""
    if report.failed:
        print(f"{report.nodeid} failed: {report.longreprtext[-3000:]}", file=sys.stderr, flush=True)


def pytest_sessionstart() -> None:
    """Make the buffer that layers without Transformer Engine use, and that is made with Megatron's own groups only."""
    parallel_state._set_global_memory_buffer()


def pytest_runtest_setup() -> None:
    """Begin a test together: gloo may fail if a rank opens groups while another one closes those of the last test."""
    if dist.is_initialized():
        dist.barrier()


def pytest_runtest_teardown() -> None:
    """End a test together, for the same reason."""
    pytest_runtest_setup()
