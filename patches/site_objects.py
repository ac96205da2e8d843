"""`site-objects`: objects that torch.distributed sends between sites are data, and no more than a bounded size.

The one place where functions of ``torch.distributed`` itself are written, in runs of several sites alone: an object of
another site is unpickled by torch, so nowhere else can it be kept from running code here. Groups inside a site, and
tensors, go past this.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from vtp_plugin.host.patching import Written, replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.comm.plain_data import MOST_BYTES, ObjectError, PlainData
from vtp_plugin.session import Session

_C10D = "torch.distributed.distributed_c10d"
_GONE = "torch.distributed sends objects as data"
_WRITE = Written(
    id="site-objects/write",
    target=f"{_C10D}:_object_to_tensor",
    when=Moment.SITES,
    why="it pickles what torch sends to a group, by names that the readers import",
    remove_when=_GONE,
)
_READ = Written(
    id="site-objects/read",
    target=f"{_C10D}:_tensor_to_object",
    when=Moment.SITES,
    why="all object collectives unpickle here, and it knows the group; an object of another site may name any "
    "function, which then runs",
    remove_when=_GONE,
)
_SHORT: Final = {
    "all_gather_object": "all-gather",
    "gather_object": "gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "scatter",
    "recv_object_list": "receive",
}
_BOUNDED: Final[Mapping[str, Written]] = {
    f"{module}:{name}": Written(
        id=f"site-objects/{short}{'' if module == _C10D else '-public'}",
        target=f"{module}:{name}",
        when=Moment.SITES,
        why="it takes as much memory as the other ranks say that their objects are long",
        remove_when=_GONE,
    )
    for name, short in _SHORT.items()
    for module in (_C10D, "torch.distributed")
}
# What torch and Megatron tell other ranks: of a checkpoint that all write or read together, and by --rerun-mode.
_CLASSES: Final[Mapping[str, tuple[str, ...]]] = {
    "torch.distributed.checkpoint.planner": (
        *("WriteItemType", "LoadItemType", "BytesIOWriteData", "TensorWriteData"),
        *("WriteItem", "ReadItem", "SavePlan", "LoadPlan"),
    ),
    "torch.distributed.checkpoint.metadata": ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex"),
    "torch.distributed.checkpoint.storage": ("WriteResult",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "megatron.core.dist_checkpointing.mapping": ("ShardedTensor", "ShardedObject"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreSavePlan",),
    "megatron.core.rerun_state_machine": (
        *("Caller", "Call", "QuickStats"),
        *("RerunMode", "RerunState", "RerunDiagnostic", "RerunValidationStatus"),
    ),
    "vtp_plugin.checkpoint.format.shard_map": ("Strided", "Block", "ShardSpec", "BucketEntry", "Bucket"),
}


def _is_file_name(value: Any) -> bool:
    """Tell whether a text is the name of a file, or its begin, and no way to another folder."""
    return isinstance(value, str) and re.fullmatch(r"(?!\.)[\w.-]*", value, re.ASCII) is not None


# Of classes whose attributes only their constructor names, and of names that torch joins to the path of a checkpoint.
_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "megatron.core.rerun_state_machine.QuickStats": {
        "samples": list[float],
        "pos": int,
        "zero_cnt": int,
        "max": float,
        "max_size": int,
    },
    "torch.distributed.checkpoint.filesystem._StoragePrefix": {"prefix": _is_file_name},
    "torch.distributed.checkpoint.filesystem._StorageInfo": {"relative_path": _is_file_name},
}


def close_objects(session: Session) -> None:
    """Let objects cross between sites as data alone, from now on; undone with the records."""
    writes = session.writes
    writes[_WRITE].put(_wrapped(_write, session, distributed_c10d._object_to_tensor))
    writes[_READ].put(_wrapped(_read, session, distributed_c10d._tensor_to_object))
    for target, declared in _BOUNDED.items():
        module, _, name = target.partition(":")
        writes[declared].put(_wrapped(_bounded, session, getattr(importlib.import_module(module), name)))


def _wrapped(replacement: Callable[..., Any], session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function run in place of torch's for groups that reach another site."""
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        if not _reaches_another_site(session, given.get("group")):
            return original(*args, **kwargs)
        return replacement(session, given, functools.partial(original, *args, **kwargs))

    return call


def _reaches_another_site(session: Session, group: Any) -> bool:
    """Tell whether ranks of several sites are in a group; yes while nobody knows which ranks these are."""
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        return False  # this rank is not in it
    if not session.is_planned:
        return True
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)  # torch 2.7 takes no None
    return len({session.planned.site_of(rank) for rank in ranks}) > 1


def _write(
    session: Session, given: Mapping[str, Any], original: Callable[[], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `_object_to_tensor`."""
    data = bytearray(_plain_data(session).write(given["obj"]))
    # A copy, since torch resizes it.
    tensor = torch.frombuffer(data, dtype=torch.uint8).clone().to(given["device"])
    return tensor, torch.tensor([tensor.numel()], dtype=torch.long, device=tensor.device)


def _read(session: Session, given: Mapping[str, Any], original: Callable[[], Any]) -> Any:
    """Replace `_tensor_to_object`."""
    return _plain_data(session).read(given["tensor"].cpu().numpy()[: int(given["tensor_size"])].tobytes())


def _bounded(session: Session, given: Mapping[str, Any], original: Callable[[], Any]) -> Any:
    """Run a collective of objects with memory for objects of a bounded length."""
    with _BoundedMemory(dist.get_world_size(given.get("group"))):
        return original()


def _plain_data(session: Session) -> PlainData:
    return PlainData(_known_classes(), session.ranks.redaction.describe, _FIELDS)


def _known_classes() -> Iterator[type]:
    for module, names in _CLASSES.items():
        if module in sys.modules:
            found = vars(sys.modules[module])
            yield from (found[name] for name in names if name in found)


class _BoundedMemory(TorchFunctionMode):
    """While it is entered, no tensor gets longer than objects of so many ranks may be.

    Args:
        num_ranks: number of ranks in the group.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            _require_bounded(int(args[0]), self._num_ranks)
        elif func is torch.Tensor.resize_:
            _require_bounded(int(args[1]), 1)
        return func(*args, **(kwargs or {}))


def _require_bounded(num_bytes: int, num_ranks: int) -> None:
    if not 0 <= num_bytes <= MOST_BYTES * num_ranks:
        raise ObjectError(f"would be {num_bytes} bytes long; {MOST_BYTES} at most")


@replaces(
    "megatron.core.dist_checkpointing.validation:_validate_common_state_dict",
    id="site-objects/common-state",
    when=Moment.SITES,
)
def _compare_common(original: Callable[[Any], None], common_state_dict: Any) -> None:
    """Replace `_validate_common_state_dict`: start-up has compared the arguments that must be equal.

    Why: it sends all arguments of rank 0 as an object to the other sites, whose folders and data differ, only to warn
    of that, and where a type differs it ends the save.

    Remove when: it compares digests.
    """
