"""`gloo-param-gather`, CPU only: plain all-gathers gather parameters; gloo's coalesced one can end the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from vtp_plugin.host.patching import Writes, Written, replaces
from vtp_plugin.patches.patch_set import Moment

_MODULE = "megatron.core.distributed.param_and_grad_buffer"


_WHY = (
    "the method looks this name up when it starts a gather; the gradient reduce-scatter does so too and must stay "
    "as it is, so the name is set only while the method runs"
)
_COALESCING = Written(
    id="gloo-param-gather/coalescing",
    target=f"{_MODULE}:_coalescing_manager",
    when=Moment.CPU,
    why=_WHY,
    remove_when="with `gloo-param-gather`",
)
_GATHER = Written(
    id="gloo-param-gather/all-gather",
    target=f"{_MODULE}:dist_all_gather_func",
    when=Moment.CPU,
    why=_WHY,
    remove_when="with `gloo-param-gather`",
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


@replaces(f"{_MODULE}:_ParamAndGradBucketGroup.start_param_sync", id="gloo-param-gather", when=Moment.CPU)
def _start(writes: Writes, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Run `_ParamAndGradBucketGroup.start_param_sync` with plain all-gathers in place of one coalesced one.

    Why: it gathers through gloo's coalesced all-gather, whose long name the two threads of a gloo group write into one
    string without a lock: heap corruption (docs/development/gloo-double-free.md); the name of a plain all-gather needs
    no heap.

    Remove when: torch guards the status that ProcessGroupGloo::runLoop writes.
    """
    gathers = _Gathers()
    with writes[_COALESCING].during(gathers.manager), writes[_GATHER].during(gathers.gather):
        original(*args, **kwargs)
