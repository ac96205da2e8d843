"""Records what a rank really issues, from outside: nothing that communicates knows about it.

* Operations are seen by a dispatch mode: every operation of ``torch.distributed``, also Megatron's own, is an operator
  ``torch.ops.c10d.*``. Those issued in a backward pass on a CPU are seen too, since it runs in the calling thread.
* The messages of one batch are those with the same call of ``batch_isend_irecv`` above them on the stack.
* Waits are no operators. While a recorder is active, ``Work.wait`` notes them and then waits.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceOp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ordering.trace import Event, Group, Kind, Trace
from vtp_plugin.errors import PlanError
from vtp_plugin.platform.interface import Platform

# The argument whose memory a collective reads, or fills, and whose size is the same on all members.
_MEMORY_OF: Mapping[str, str] = {
    **{"allreduce_": "tensors", "allreduce_coalesced_": "tensors", "broadcast_": "tensors", "reduce_": "tensors"},
    **{"allgather_": "input_tensors", "allgather_coalesced_": "input_list", "_allgather_base_": "input_tensor"},
    **{"allgather_into_tensor_coalesced_": "inputs", "gather_": "input_tensors"},
    **{"gather_into_tensor_": "input_tensor", "reduce_scatter_": "input_tensors"},
    **{"_reduce_scatter_base_": "input_tensor", "reduce_scatter_tensor_coalesced_": "inputs"},
    "scatter_": "output_tensors",
}
# Members may give tensors of different sizes, or none.
_WITHOUT_SIZE = frozenset({"alltoall_", "alltoall_base_", "barrier", "monitored_barrier_"})
_BATCH: CodeType = inspect.unwrap(dist.batch_isend_irecv).__code__


class Recorder(TorchDispatchMode):
    """Context in which the operations, waits and batches of the calling thread are recorded.

    Backends that coalesce the messages of a batch into one handle (NCCL, HCCL) are not supported yet. A handle that its
    owner drops without waiting is kept alive, so that the run goes on and the check can report it.

    Args:
        platform: tells the current stream.

    Raises:
        RuntimeError: on entry, when another recorder is active in this process.
    """

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self._platform = platform
        self._events: list[Event] = []
        self._handles: weakref.WeakKeyDictionary[dist.Work, int] = weakref.WeakKeyDictionary()
        self._open_works: dict[int, dist.Work] = {}
        self._num_handles = 0
        self._num_batches = 0
        self._batch_frame: FrameType | None = None
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._num_storages = 0

    def __enter__(self) -> Recorder:
        self._wait = dist.Work.wait
        if inspect.isfunction(self._wait):
            raise RuntimeError(f"a recorder is active already ({self._wait.__qualname__})")

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            self._on_wait(work)
            return self._wait(work, *args, **kwargs)

        dist.Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        dist.Work.wait = self._wait
        self._batch_frame = None
        self._open_works.clear()

    def note(self, label: str) -> None:
        """Mark what this rank does next, such as ``"forward 3"``, or :data:`END_OF_STEP`."""
        self._add(Kind.MARK, name=label)

    def trace(self) -> Trace:
        """Give what was recorded so far."""
        return Trace(rank=dist.get_rank(), events=tuple(self._events))

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator; record it if it communicates."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional":
            raise PlanError(f"{func} is not known to the recorder")
        if func.namespace == "c10d":
            self._on_operation(func, args, kwargs or {}, result)
        return result

    def _on_operation(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if "process_group" not in arguments:
            return
        group = _group(dist.ProcessGroup.unbox(arguments["process_group"]))
        name = func._schema.name.removeprefix("c10d::")
        handle = self._new_handle(result)
        if name in ("send", "recv_"):
            kind = Kind.SEND if name == "send" else Kind.RECV
            peer = group.ranks[arguments["dst" if name == "send" else "src"]]
            memory = self._memory(arguments["tensors"])
            self._add(kind, group=group, peer=peer, batch=self._batch(), handle=handle, **memory)
        else:
            root = arguments.get("root_rank")
            peer = None if root is None else group.ranks[root]
            memory = {} if name in _WITHOUT_SIZE else self._memory(arguments[_MEMORY_OF[name]])
            # Before 2.8 torch shows the operation to nobody.
            unbox: Any = getattr(ReduceOp, "unbox", None)
            if "reduce_op" in arguments and unbox is not None:
                name = f"{name} {unbox(arguments['reduce_op']).op.name.lower()}"
            self._add(Kind.COLLECTIVE, name=name, group=group, peer=peer, handle=handle, **memory)
        if handle not in self._open_works:
            # An operator without a handle has waited.
            self._add(Kind.WAIT, handle=handle)

    def _new_handle(self, result: Any) -> int:
        handle = self._num_handles
        self._num_handles += 1
        boxed = result[-1] if isinstance(result, tuple) else result
        if boxed is not None:
            # While this one lives, all others get the same Python object for the handle.
            work = dist.Work.unbox(boxed)
            self._handles[work] = handle
            self._open_works[handle] = work
        return handle

    def _memory(self, tensors: Any) -> dict[str, Any]:
        flat = list(_flat(tensors))
        sizes_bytes = [tensor.numel() * tensor.element_size() for tensor in flat]
        known = {"num_bytes": sum(sizes_bytes), "dtype": str(flat[0].dtype).removeprefix("torch.")} if flat else {}
        if len(flat) == 1:
            known["tensor"] = self._storage_number(flat[0])
            known["offset_bytes"] = int(flat[0].storage_offset()) * flat[0].element_size()
        return known

    def _storage_number(self, tensor: torch.Tensor) -> int:
        """Number storages by their life: memory that is used again after it was freed gets a new number."""
        storage = tensor.untyped_storage()
        known = self._storages.get(storage.data_ptr())
        if known is not None and not known[0].expired():
            return known[1]
        self._num_storages += 1
        self._storages[storage.data_ptr()] = StorageWeakRef(storage), self._num_storages
        return self._num_storages

    def _on_wait(self, work: dist.Work) -> None:
        handle = self._handles.get(work)
        if handle is not None:
            self._open_works.pop(handle, None)
            self._add(Kind.WAIT, handle=handle)

    def _batch(self) -> int | None:
        """Number the call of ``batch_isend_irecv`` that the current operation is in."""
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not _BATCH:
            frame = frame.f_back
        if frame is None:
            return None
        if frame is not self._batch_frame:
            # Kept, so that no later frame can be the same object.
            self._batch_frame = frame
            self._num_batches += 1
        return self._num_batches - 1

    def _add(self, kind: Kind, **values: Any) -> None:
        stream = getattr(self._platform.module().current_stream(), "stream_id", "")
        position = len(self._events)
        self._events.append(Event(rank=dist.get_rank(), position=position, kind=kind, stream=str(stream), **values))


def _group(group: dist.ProcessGroup) -> Group:
    """Describe a group; names are equal on all members, because all ranks make all groups in one order."""
    description = "" if group.group_desc == "undefined" else f" {group.group_desc}"
    return Group(name=f"{group.group_name}{description}", ranks=tuple(dist.get_process_group_ranks(group)))


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)
