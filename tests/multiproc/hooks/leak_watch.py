"""Watches all that leaves a process of a training run, from outside the plugin, and looks for the samples in it.

Every operation of ``torch.distributed``, pickled objects included, is an operator ``torch.ops.c10d.*``, which a
dispatch mode sees whoever calls it; values that go by way of a store are seen by wrapping its methods. Nothing here
knows how the plugin works, and nothing of the plugin is used.
"""

from __future__ import annotations

import functools
import os
import pickle
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.training.training as training
import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets import gpt_dataset
from megatron.core.models.gpt import gpt_model
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multiproc.hooks.in_place import Facts, after, around, before

# Ids of the samples; nothing else in these runs has values in this range.
FIRST_ID, NUM_IDS = 4000, 1000
SECRETS = ("tokens", "labels", "loss_mask", "position_ids")

# The argument with what the calling rank contributes. Receives contribute nothing.
_CONTRIBUTED: Mapping[str, str | None] = {
    **{"send": "tensors", "recv_": None, "recv_any_source_": None, "barrier": None, "monitored_barrier_": None},
    **{"allreduce_": "tensors", "allreduce_coalesced_": "tensors", "reduce_": "tensors", "broadcast_": "tensors"},
    **{"allgather_": "input_tensors", "_allgather_base_": "input_tensor", "allgather_coalesced_": "input_list"},
    **{"allgather_into_tensor_coalesced_": "inputs", "gather_": "input_tensors", "scatter_": "input_tensors"},
    **{"reduce_scatter_": "input_tensors", "_reduce_scatter_base_": "input_tensor"},
    **{"reduce_scatter_tensor_coalesced_": "inputs", "alltoall_": "input_tensors", "alltoall_base_": "input"},
}


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What one operation took from this process: a tensor, or bytes for a store."""

    how: str
    values: torch.Tensor | bytes

    @property
    def memory(self) -> bytes:
        """All that left, as bytes."""
        return self.values if isinstance(self.values, bytes) else memory_of(self.values)

    @property
    def form(self) -> tuple[str, str, int]:
        """Operation, type and number of elements."""
        if isinstance(self.values, bytes):
            return self.how, "bytes", len(self.values)
        return self.how, str(self.values.dtype).removeprefix("torch."), self.values.numel()


class Watch(TorchDispatchMode):
    """Context that keeps a copy of everything that leaves the process for a rank outside ``home``.

    Args:
        home: ranks whose traffic among themselves is their own affair.
    """

    def __init__(self, home: Sequence[int]) -> None:
        super().__init__()
        self._home = set(home)
        self.outgoing: list[Outgoing] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator, after a look at what it ships."""
        assert func.namespace != "_c10d_functional", f"{func} is not known here"
        if func.namespace == "c10d":
            self._look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _look(self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        names = [argument.name for argument in func._schema.arguments]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        name = func._schema.name.removeprefix("c10d::")
        contributed = _CONTRIBUTED[name]
        if contributed is None:
            return
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"]))
        is_root = name != "broadcast_" or ranks[arguments["root_rank"]] == dist.get_rank()
        reached = {ranks[arguments["dst"]]} if name == "send" else set(ranks)
        if is_root and reached - self._home:
            self.outgoing += [Outgoing(name, tensor.detach().clone()) for tensor in _flat(arguments[contributed])]

    def watch_stores(self) -> None:
        """Keep what is put into stores as well; for a process that ends soon, since nothing is put back."""
        for kind in (dist.Store, dist.PrefixStore, dist.TCPStore, dist.FileStore, dist.HashStore):
            for name in ("set", "compare_set", "append", "multi_set", "queue_push"):
                if name in vars(kind):
                    setattr(kind, name, self._noting(f"store {name}", getattr(kind, name)))

    def _noting(self, how: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def put(store: Any, *args: Any) -> Any:
            self.outgoing += [Outgoing(how, part) for part in map(_bytes_of, args)]
            return method(store, *args)

        return put


def _bytes_of(value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for item in tensors:
            yield from _flat(item)


def findings(
    outgoing: Sequence[Outgoing], samples: Sequence[Mapping[str, torch.Tensor]], secrets: Sequence[str] = SECRETS
) -> list[tuple[str, str]]:
    """Name every secret that is found in what left, with the operation that shipped it.

    Token ids and labels are found one by one, as numbers; all also as rows: as numbers in any dimension of a tensor, in
    memory as any usual type, and as text.

    Args:
        outgoing: what left.
        samples: the secrets by their names, each a row, or several of one length.
        secrets: names of what must not leave.
    """
    rows = {name: {tuple(row) for sample in samples for row in _rows(sample[name])} for name in secrets}
    patterns = {name: {text for row in found for text in _encodings(row)} for name, found in rows.items()}
    found: list[tuple[str, str]] = []
    for item in outgoing:
        raw = item.memory
        if isinstance(item.values, bytes) or item.values.dtype == torch.uint8:
            raw += _unpickled(raw)
        for name in secrets:
            is_there = any(pattern in raw for pattern in patterns[name])
            if not isinstance(item.values, bytes):
                is_there = is_there or _holds_rows(item.values, rows[name])
                is_there = is_there or (name in ("tokens", "labels") and _holds_ids(item.values))
            if is_there:
                found.append((item.how, name))
    return found


def _rows(values: torch.Tensor) -> list[list[float]]:
    return values.reshape(-1, values.shape[-1]).tolist()


def _holds_ids(values: torch.Tensor) -> bool:
    numbers = values.double()
    return bool(((numbers >= FIRST_ID) & (numbers < FIRST_ID + NUM_IDS) & (numbers == numbers.round())).any())


def _holds_rows(values: torch.Tensor, rows: set[tuple[float, ...]]) -> bool:
    length = len(next(iter(rows)))
    orders = [values.double().movedim(dim, -1).flatten() for dim in range(max(values.dim(), 1))] if values.dim() else []
    windows = [order.unfold(0, length, 1) for order in orders if len(order) >= length]
    return any(bool((window == torch.tensor(row).double()).all(1).any()) for window in windows for row in rows)


def memory_of(values: torch.Tensor) -> bytes:
    """Give the bytes of a tensor, in the order of its elements."""
    return values.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()


def _unpickled(raw: bytes) -> bytes:
    """Give what a pickled object looks like when it is printed; nothing for other bytes."""
    if not (raw.startswith(pickle.PROTO) and b"." in raw):
        return b""
    try:
        return repr(pickle.loads(raw)).encode()
    except Exception:  # these bytes need not be a pickle after all
        return b""


def _encodings(row: tuple[float, ...]) -> Iterator[bytes]:
    for kind in ("int64", "int32", "int16", "float64", "float32", "float16"):
        yield numpy.array(row, dtype=kind).tobytes()
    for separator in (", ", ",", " "):
        yield separator.join(str(value) for value in row).encode()
        yield separator.join(str(int(value)) for value in row).encode()


def watch_edge(facts: Facts) -> Callable[[], None]:
    """Watch the whole run of the rank with the data; afterwards note what left, and what of the samples was in it."""
    samples = _give_samples_patterns()
    facts["num_samples"] = 0
    watch = Watch(home=[0])
    watch.watch_stores()
    watch.__enter__()

    def finish() -> None:
        watch.__exit__(None, None, None)
        if not samples:
            return
        facts["num_samples"] = len(samples)
        facts["forms"] = Counter(item.form for item in watch.outgoing)
        facts["lengths"] = [_row(item.values) for item in watch.outgoing if item.form[:2] == ("send", "int32")]
        facts["ends"] = [_row(sample["cu_seqlens"]) for sample in samples if "cu_seqlens" in sample]
        facts["findings"] = findings(watch.outgoing, samples)
        tensors = [item.values for item in watch.outgoing if isinstance(item.values, torch.Tensor)]
        facts["numbers"] = [float(values) for values in tensors if values.numel() == 1]

    return finish


def _row(values: torch.Tensor | bytes) -> tuple[int, ...]:
    assert isinstance(values, torch.Tensor)
    return tuple(values.flatten().tolist())


def _give_samples_patterns() -> list[dict[str, torch.Tensor]]:
    """Give every sample a loss mask and positions of its own, and keep the samples that are read."""
    read: list[dict[str, torch.Tensor]] = []

    @around(gpt_dataset.GPTDataset, "__getitem__")
    def __getitem__(original: Any, self: Any, index: int | None) -> dict[str, torch.Tensor]:
        sample = dict(original(self, index))
        generator = torch.Generator().manual_seed(int(sample["tokens"].sum()))
        length = len(sample["tokens"])
        sample["loss_mask"] = (torch.rand(length, generator=generator) < 0.5).float()
        sample["position_ids"] = torch.randperm(length, generator=generator)
        read.append(sample)
        _NEWEST[:] = [sample]
        return sample

    return read


_NEWEST: list[dict[str, torch.Tensor]] = []


def plant_leaks(facts: Facts) -> None:
    """Ship a sample from rank 0 to rank 1, or to all ranks, after the first step, in many ways."""

    @after(training, "train_step")
    def leak(*_args: Any, **_kwargs: Any) -> None:
        if not facts.get("has_leaked"):
            facts["has_leaked"] = True
            _leak()


def _leak() -> None:
    rank = dist.get_rank()
    length = training.get_args().seq_length
    blank = {name: torch.zeros(length, dtype=torch.int64) for name in SECRETS}
    sample = _NEWEST[0] if rank == 0 else blank
    if rank == 0:
        dist.send(sample["tokens"], 1)
    elif rank == 1:
        dist.recv(torch.zeros(length, dtype=torch.int64), 0)
    # In another type, padded, and as one entry of each row.
    dist.all_reduce(torch.nn.functional.pad(sample["labels"].float(), (3, 3)).unsqueeze(1).expand(-1, 2).contiguous())
    dist.broadcast(sample["position_ids"].to(torch.int16).view(torch.uint8), 0)
    dist.broadcast_object_list([{"mask": sample["loss_mask"].tolist()} if rank == 0 else None], 0)
    gathered = [torch.zeros(length) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, sample["loss_mask"].float())
    if rank == 0:
        dist.distributed_c10d._get_default_store().set("sample", str(sample["tokens"].tolist()))


def record_posts(facts: Facts) -> None:
    """Note all that this process puts into stores, whether the run ends well or not."""
    watch = Watch(home=[])
    watch.watch_stores()
    facts["posts"] = _Texts(watch)


class _Texts:
    """What was put into stores, as text; made when the facts are stored."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        posts = [item.values for item in self._watch.outgoing if isinstance(item.values, bytes)]
        return list, ([post.decode(errors="replace") for post in posts],)


def fail_in_data(facts: Facts) -> None:
    """Raise while a sample is read, with the sample in the text."""

    @after(gpt_dataset.GPTDataset, "__getitem__")
    def fail(sample: dict[str, torch.Tensor], self: Any, _index: int | None) -> None:
        raise ValueError(f"bad sample {sample['tokens'].tolist()} in {os.path.abspath(self.dataset.path_prefix)}")


def fail_in_loss(facts: Facts) -> None:
    """Raise where the loss is computed, with the labels in the text."""

    @before(gpt_model.GPTModel, "forward")
    def fail(self: Any, *_args: Any, labels: torch.Tensor | None = None, **_kwargs: Any) -> None:
        if labels is not None and self.post_process:
            raise FloatingPointError(f"no loss for {labels.flatten().tolist()}")


def interrupt(facts: Facts) -> None:
    """Send this process the signal of Ctrl-C in the middle of a step."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets what it runs in the background ignore it
    before(gpt_dataset.GPTDataset, "__getitem__")(lambda _self, _index: os.kill(os.getpid(), signal.SIGINT))
