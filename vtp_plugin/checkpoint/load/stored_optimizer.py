"""Reads the distributed optimizer of a checkpoint into another layout, piece by piece, with torch's own reader."""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from vtp_plugin.checkpoint.format.check_map import check_wanted
from vtp_plugin.checkpoint.format.contents import Contents
from vtp_plugin.checkpoint.format.fill import Copy
from vtp_plugin.checkpoint.format.shard_map import Bucket, ShardSpec, Strided
from vtp_plugin.checkpoint.format.untrusted import refused
from vtp_plugin.errors import ConfigError, refuse


@dataclass(frozen=True, slots=True)
class Wanted:
    """A range of a rank's shard of a parameter, whose states this process holds.

    Attributes:
        shard: the shard.
        start: first element of the range in the shard.
        stop: the element behind the last one.
        states: names, in the checkpoint, of the states that are held.
    """

    shard: ShardSpec
    start: int
    stop: int
    states: tuple[str, ...]


class StoredOptimizer:
    """The distributed optimizer of a checkpoint, bucket by bucket.

    Args:
        contents: the checkpoint.
        reader: reader of its files; what lies where in them it learns here.

    Raises:
        ConfigError: the map does not fit what is stored.
    """

    def __init__(self, contents: Contents, reader: StorageReader) -> None:
        self.folder, self.layout = contents.folder, contents.stored()
        self._objects, self._reader = contents.index.objects, reader
        pieces = contents.extents_of_buckets().items()
        extents = {MetadataIndex(f"{key}.{state}", (offset,)): extent for (key, state, offset), extent in pieces}
        extents |= {MetadataIndex(key): extent for key, extent in self._objects.items()}
        self._places = {index: _StorageInfo(at.file, at.offset, at.length or 0) for index, at in extents.items()}
        reader.set_up_storage_reader(Metadata({}, storage_data=self._places), is_coordinator=False)

    def __repr__(self) -> str:
        return f"<optimizer of {self.folder.name}>"

    def prefix_of(self, own: Sequence[Bucket]) -> str | None:
        """Find the prefix with which some buckets of this run are stored under the same keys; None without one.

        Args:
            own: buckets of this run, with keys as a single optimizer has them. In a chain of several optimizers each
                has its number before the keys.
        """
        if not own:
            return None
        ends = [key.removesuffix(own[0].key) for key in self.layout.buckets if key.endswith(own[0].key)]
        for prefix in ends:
            stored = [self.layout.buckets.get(prefix + bucket.key) for bucket in own]
            if all(a is not None and _is_same(a, b) for a, b in zip(stored, own, strict=True)):
                return prefix
        return None

    def objects(self, name: str) -> Iterator[Any]:
        """Yield the object of a name of every data-parallel group, each read only when it is asked for.

        Args:
            name: name of the object, such as ``optimizer`` for the groups of parameters.
        """
        for key in self._objects:
            if f".{name}/shard_" in key:
                planner = _Planner({})
                self._reader.read_data(LoadPlan([_item(key, (), LoadItemType.BYTE_IO)]), planner)
                yield planner.objects[key][0]

    def plan(self, wanted: Sequence[Wanted]) -> tuple[tuple[Copy, ...], ...]:
        """Plan the copies that fill the ranges of this process.

        Raises:
            ConfigError: something is not stored.
        """
        refuse(check_wanted(str(self.folder), self.layout, (want.shard for want in wanted)))
        copies = tuple(self.layout.fill(want.shard, want.start, want.stop) for want in wanted)
        for want, found in zip(wanted, copies, strict=True):
            for copy in found:
                for state in want.states:
                    if MetadataIndex(f"{copy.piece.key}.{state}", (copy.piece.offset,)) not in self._places:
                        raise ConfigError(
                            f"{self.folder}: {state} of {want.shard.name} is not stored, and this run's optimizer has "
                            "it; use the same --optimizer, or load only the weights with --no-load-optim"
                        )
        return copies

    def read(self, jobs: Iterable[tuple[Copy, Mapping[str, torch.Tensor]]]) -> None:
        """Read every piece once, and copy the needed parts of it into tensors.

        Args:
            jobs: copies, and the flat tensors that they fill, by the names of their states.
        """
        by_piece: defaultdict[MetadataIndex, list[tuple[Copy, torch.Tensor]]] = defaultdict(list)
        for copy, tensors in jobs:
            for state, tensor in tensors.items():
                by_piece[MetadataIndex(f"{copy.piece.key}.{state}", (copy.piece.offset,))].append((copy, tensor))
        in_order = sorted(by_piece, key=lambda index: (self._places[index].relative_path, self._places[index].offset))
        planner = _Planner(by_piece)
        for index in in_order:
            piece = by_piece[index][0][0].piece
            # Asked for several, the reader keeps each until it has the next: two would be in memory.
            self._reader.read_data(LoadPlan([_item(index.fqn, (piece.offset,), numel=piece.numel)]), planner)


def _is_same(a: Bucket, b: Bucket) -> bool:
    """Tell whether the same lies in two buckets, whoever else may hold it."""
    parts = [[(replace(part.shard, is_copy=False), part.offset) for part in bucket.parts] for bucket in (a, b)]
    return a.numel == b.numel and parts[0] == parts[1]


def _item(key: str, offset: tuple[int, ...], kind: LoadItemType = LoadItemType.TENSOR, *, numel: int = 0) -> ReadItem:
    """Ask for a stored piece, or an object, as a whole."""
    return ReadItem(
        type=kind,
        dest_index=MetadataIndex(key),
        dest_offsets=torch.Size((0,)),
        storage_index=MetadataIndex(key, offset or None),
        storage_offsets=torch.Size((0,)),
        lengths=torch.Size((numel,)),
    )


class _Planner(DefaultLoadPlanner):
    """Gives torch's reader the targets that take what it reads.

    Args:
        wanted: for every piece the copies, and the tensors that they fill.
    """

    def __init__(self, wanted: Mapping[MetadataIndex, list[tuple[Copy, torch.Tensor]]]) -> None:
        super().__init__()
        self._wanted = wanted
        self.objects: dict[str, Any] = {}

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        try:
            self.objects[key] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise refused(f"{key}, an object of the checkpoint,", error) from None

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        # The reader asks it for its size and copies into it, and nothing else.
        return cast(torch.Tensor, _Target(read_item.lengths, self._wanted[read_item.storage_index]))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        del read_item, tensor


class _Target:
    """Stands for a tensor that receives a piece and copies its parts where they belong: it is in memory only once."""

    def __init__(self, size: torch.Size, copies: list[tuple[Copy, torch.Tensor]]) -> None:
        self._size, self._copies = size, copies

    def detach(self) -> _Target:
        return self

    def size(self) -> torch.Size:
        return self._size

    def copy_(self, piece: torch.Tensor) -> None:
        for copy, tensor in self._copies:
            _view(tensor, copy.target, copy.shape).copy_(_view(piece, copy.source, copy.shape))


def _view(flat: torch.Tensor, strided: Strided, shape: tuple[int, ...]) -> torch.Tensor:
    return flat.as_strided(shape, strided.strides, flat.storage_offset() + strided.offset)


class Request:
    """What one optimizer of this process reads of a stored one.

    Args:
        stored: the stored optimizer.
        wanted: the ranges, in the order in which their tensors are given later.
        take: reads what is stored besides tensors; called after planning.

    Attributes:
        plan: copies that fill the ranges; empty before :meth:`prepare`.
    """

    def __init__(self, stored: StoredOptimizer, wanted: Sequence[Wanted], take: Callable[[], None]) -> None:
        self._stored, self._wanted, self._take = stored, wanted, take
        self.plan: tuple[tuple[Copy, ...], ...] = ()

    def prepare(self) -> None:
        """Plan, and read what is small; no tensor of the run is changed.

        Raises:
            ConfigError: what is stored is not what this run wants.
        """
        self.plan = self._stored.plan(self._wanted)
        self._take()

    def fill(self, tensors: Iterable[Mapping[str, torch.Tensor]]) -> None:
        """Read what was planned.

        Args:
            tensors: for every range its flat tensors, by the names of their states.
        """
        pairs = zip(self.plan, tensors, strict=True)
        with torch.no_grad():
            self._stored.read((copy, states) for copies, states in pairs for copy in copies)
