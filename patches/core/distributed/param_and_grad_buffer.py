"""P6, CPU only: parameters are gathered by plain all-gathers; gloo's coalesced one can end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.patching import PatchRecord, Record, WriteRecord, wrap_with

_MODULE = "megatron.core.distributed.param_and_grad_buffer"


def records() -> tuple[Record, ...]:
    """Give the records of this module."""
    coalescing, gather = (
        WriteRecord(
            id=f"P6{suffix}",
            target=f"{_MODULE}:{name}",
            why="the method looks this name up when it starts a gather; the sum of gradients does so too and must stay "
            "as it is, so the name is set only while the method runs",
            remove_when="with P6",
        )
        for suffix, name in (("b", "_coalescing_manager"), ("c", "dist_all_gather_func"))
    )
    return (
        PatchRecord(
            id="P6",
            target=f"{_MODULE}:_ParamAndGradBucketGroup.start_param_sync",
            build=wrap_with(_start, coalescing, gather),
            why="it gathers through gloo's coalesced all-gather, whose long name the two threads of a gloo group write "
            "into one string without a lock: heap corruption (docs/gloo-double-free.md); the name of a plain "
            "all-gather needs no heap",
            remove_when="torch guards the status that ProcessGroupGloo::runLoop writes",
        ),
        coalescing,
        gather,
    )


class _Gathers:
    """Plain all-gathers, with the interface of torch's coalescing manager: a context, and `wait()` afterwards."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []

    @contextmanager
    def manager(self, group: dist.ProcessGroup, async_ops: bool) -> Iterator[_Gathers]:
        yield self

    def gather(self, output: torch.Tensor, shard: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool) -> None:
        work = dist.all_gather_into_tensor(output, shard, group=group, async_op=async_op)
        if work is not None:
            self._works.append(work)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _start(
    coalescing: WriteRecord, gather: WriteRecord, original: Callable[..., None], *args: Any, **kwargs: Any
) -> None:
    """Run `_ParamAndGradBucketGroup.start_param_sync` with plain all-gathers in place of one coalesced one."""
    gathers = _Gathers()
    with coalescing.during(gathers.manager), gather.during(gathers.gather):
        original(*args, **kwargs)
