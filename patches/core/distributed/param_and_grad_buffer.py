"""P6, CPU only: parameters are gathered by plain all-gathers; gloo's coalesced one can end the process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from vtp_plugin.patching import PatchRecord


def records() -> tuple[PatchRecord, ...]:
    """Give the records of this module."""
    return (
        PatchRecord(
            id="P6",
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
            build=_start,
            why="it gathers through gloo's coalesced all-gather, whose long name the two threads of a gloo group write "
            "into one string without a lock: heap corruption (docs/gloo-double-free.md); the name of a plain "
            "all-gather needs no heap",
            versions=">=0.19,<0.20",
            remove_when="torch guards the status that ProcessGroupGloo::runLoop writes",
        ),
    )


class _Gathers:
    """Plain all-gathers, with the interface of torch's coalescing manager."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    def gather(self, output: torch.Tensor, own: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
        work = dist.all_gather_into_tensor(output, own, group=group, async_op=async_op)
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _start(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start_param_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        with _one_by_one():
            original(self, *args, **kwargs)

    return start_param_sync


@contextmanager
def _one_by_one() -> Iterator[None]:
    """Let Megatron's module gather plainly: it looks up both names when it starts a gather, and nobody else does."""
    gathers = _Gathers()

    @contextmanager
    def manager(group: dist.ProcessGroup, async_ops: bool) -> Iterator[_Gathers]:
        yield gathers

    names = {"_coalescing_manager": manager, "dist_all_gather_func": gathers.gather}
    originals = {name: getattr(param_and_grad_buffer, name) for name in names}
    try:
        for name, replacement in names.items():
            setattr(param_and_grad_buffer, name, replacement)
        yield
    finally:
        for name, original in originals.items():
            setattr(param_and_grad_buffer, name, original)
