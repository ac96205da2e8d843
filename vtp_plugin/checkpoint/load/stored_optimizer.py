"""The optimizer's state as it is stored, element by element, group by group."""

from __future__ import annotations

import io
import itertools
import math
import mmap
import pickle
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from vtp_plugin.checkpoint.format.checkpoint_files import Payload, find_payload, itemsize
from vtp_plugin.checkpoint.format.contents import MASTER, Contents, Part, no_map, pairs
from vtp_plugin.checkpoint.format.index import DamagedError, Extent, refused
from vtp_plugin.checkpoint.format.infer_map import check_wanted
from vtp_plugin.checkpoint.format.plan_copies import Copy
from vtp_plugin.checkpoint.format.resolver import IN_BUCKETS
from vtp_plugin.checkpoint.format.shard_map import Bucket, ShardSpec, Strided, boxes_between
from vtp_plugin.checkpoint.save.atomic_dir import PART_BYTES
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.util.index_boxes import Box, box_shape, format_box
from vtp_plugin.util.typed_json import open_file


def require_masters(contents: Contents, share: int = 0, num_shares: int = 1) -> None:
    """Refuse an inferred map unless every master weight, rounded, equals its weight to the last bit.

    Args:
        contents: a checkpoint; one that has its map needs no proof.
        share: number of this process's share of the proof, where several processes divide it.
        num_shares: number of processes that divide the proof.

    Raises:
        ConfigError: the first parameter that does not fit is named.
    """
    if contents.form not in IN_BUCKETS or contents.has_map:
        return
    masters, weights = Elements(contents.folder), Elements(contents.folder)
    own = itertools.islice(_slabs(contents), share, None, num_shares)
    for name, of_master, of_weight, box in own:
        dtypes = masters.dtype(of_master), weights.dtype(of_weight)
        rounded = typed(masters.read(of_master, box), dtypes[0]).to(getattr(torch, dtypes[1]))
        if not torch.equal(rounded.view(torch.uint8), weights.read(of_weight, box)):
            raise no_map(contents.folder, f"{name} at {format_box(box)} is not its master weight, rounded")


def _slabs(contents: Contents) -> Iterator[tuple[str, Part, Part, Box]]:
    """Yield what to compare, always in the same order."""
    weights = contents.weights()
    for (state, name), master in contents.states().items():
        if state != MASTER:
            continue
        common, problem = pairs(master, weights[name])
        if problem is not None:
            raise no_map(contents.folder, f"master weights and weights of {name} cannot be compared: {problem}")
        for of_master, of_weight, box in common:
            yield from ((name, of_master, of_weight, inner) for inner in slabs(box, "float32"))


SLAB_BYTES = 8 << 20
"""How much is read at once."""
_PAYLOADS_KEPT = 4096


def slabs(box: Box, dtype: str) -> Iterator[Box]:
    """Cut a box into boxes that are small enough to be read at once.

    >>> [*slabs(((1, 3), (0, 5)), "float32")]
    [((1, 3), (0, 5))]
    """
    shape = box_shape(box)
    count, limit = math.prod(shape), SLAB_BYTES // itemsize(dtype)
    for first in range(0, count, limit):
        for inner in boxes_between(shape, first, min(count, first + limit)):
            yield tuple((a + start, b + start) for (a, b), (start, _) in zip(inner, box, strict=True))


class Elements:
    """Reads tensors of a checkpoint.

    Args:
        folder: folder of the checkpoint.

    Attributes:
        folder: folder of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: tuple[str, mmap.mmap, torch.Tensor] | None = None
        self._find = lru_cache(_PAYLOADS_KEPT)(self._find_payload)

    def __repr__(self) -> str:
        return f"<elements of {self.folder}>"

    def dtype(self, part: Part) -> str:
        """Return the type of the elements of a part."""
        return self._find(part.extent).dtype

    def read(self, part: Part, box: Box) -> torch.Tensor:
        """Read a box of a whole parameter, out of a part that holds it.

        Args:
            part: the part.
            box: a box inside that of the part, in coordinates of the whole parameter.

        Returns:
            The bytes of the elements, in the order of the whole.

        Raises:
            ConfigError: the file is broken.
        """
        payload = self._find(part.extent)
        size = itemsize(payload.dtype)
        strided, shape = part.strided.at(box, part.box), box_shape(box)
        reach = sum((length - 1) * stride for length, stride in zip(shape, strided.strides, strict=True))
        if strided.offset + reach >= math.prod(payload.shape):
            raise self._broken(part.extent, "holds fewer elements than its index says")
        mapped, data = self._mapped(part.extent.file)
        begin = payload.offset + strided.offset * size
        strides = (*(stride * size for stride in strided.strides), 1)
        found = data.as_strided((*shape, size), strides, begin).reshape(-1).clone()
        _forget(mapped, begin, begin + (reach + 1) * size)
        return found

    def _find_payload(self, extent: Extent) -> Payload:
        try:
            return find_payload(self.folder, extent)
        except DamagedError as error:
            raise self._broken(extent, str(error)) from None

    def _broken(self, extent: Extent, problem: str) -> ConfigError:
        file = self.folder / extent.file
        return ConfigError(f"{file} {problem}; without it this checkpoint cannot be read; copy it again")

    def _mapped(self, name: str) -> tuple[mmap.mmap, torch.Tensor]:
        """Map a file into memory; only what is touched is read."""
        if self._file is None or self._file[0] != name:
            with open_file(self.folder / name) as file:
                # A copy on write, since torch warns of memory that it may not write.
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._file = name, mapped, torch.frombuffer(mapped, dtype=torch.uint8)
        return self._file[1], self._file[2]


def copy_bytes(folder: Path, extent: Extent, target: BinaryIO) -> None:
    """Append bytes of a checkpoint's file to another file, whatever they are.

    Raises:
        ConfigError: there are fewer.
    """
    with open_file(folder / extent.file) as source:
        source.seek(extent.offset)
        left = extent.length or 0
        while left:
            data = source.read(min(left, PART_BYTES))
            if not data:
                raise ConfigError(
                    f"{folder / extent.file} is cut off; without it this checkpoint cannot be read; copy it again"
                )
            target.write(data)
            left -= len(data)


def _forget(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Give back the memory of what was read; the system keeps it while it has room."""
    start = begin - begin % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, end - start)


def typed(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """View bytes as elements of a type.

    Raises:
        ConfigError: this torch has no such type.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConfigError(f"elements have the type {dtype}; torch {torch.__version__} has none; use a newer torch")
    return data.view(found)


Group = Mapping[str, Any]
"""A group of parameters of an optimizer: what it says of itself, by name."""

RATES: Final = ("max_lr", "min_lr", "start_wd", "end_wd", "lr_mult")
"""What the scheduler reads of a group, and flags may change at a resume."""
_KINDS: Final = ("is_expert_parallel", "is_decoupled_lr", "default_config", "wd_mult", "optimizer")
_MARKS: Final = (*RATES, *_KINDS)
# What the scheduler computes before each step.
_COMPUTED: Final = ("params", "lr", "weight_decay")


class Rates(Enum):
    """Whose rates a resumed run has."""

    OWN = "--override-opt_param-scheduler"
    STORED = "--use-checkpoint-opt_param-scheduler"
    SAME = ""
    """Neither is given: those of the run and of the checkpoint are to be the same."""


def marks(group: Group) -> dict[str, Any]:
    """Give what tells a group from others, under the names that it has: ``lr_mult`` may be ``pre_lr_mult``.

    >>> marks({"max_lr": 1e-3, "pre_wd_mult": 0.0, "betas": (0.9, 0.95)})
    {'max_lr': 0.001, 'pre_wd_mult': 0.0}
    """
    return {key: value for key, value in group.items() if key.removeprefix("pre_") in _MARKS}


def rates_of(group: Group) -> dict[str, Any]:
    """Give a group's rates.

    >>> rates_of({"max_lr": 1e-3, "wd_mult": 0.0})
    {'max_lr': 0.001}
    """
    return {key: value for key, value in group.items() if key.removeprefix("pre_") in RATES}


def _values(group: Group, names: Iterable[str]) -> tuple[Hashable, ...]:
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in names)


def _exactly(group: Group) -> Hashable:
    return _values(group, _MARKS)


def _by_kind(group: Group) -> Hashable:
    return _values(group, (*_KINDS, "eps"))


# Of --use-mup groups have an eps of their own; a run with other flags may have groups that the stored one had not.
_LEVELS: Final[tuple[Callable[[Group], Hashable], ...]] = (
    _exactly,
    _by_kind,
    lambda group: _values(group, _KINDS),
    lambda group: _values(group, ("is_expert_parallel", "wd_mult")),
    lambda group: _values(group, ("is_expert_parallel",)),
)


def are_found(own: Sequence[Group], stored: Sequence[Group], rates: Rates) -> bool:
    """Tell whether each group of a run surely has its counterpart among stored ones, so that no more need be read."""
    key = _by_kind if rates is Rates.OWN else _exactly
    return {*map(key, own)} <= {*map(key, stored)}


def counterparts(where: str, own: Sequence[Group], stored: Sequence[Group], rates: Rates) -> list[Group]:
    """Find for each group of a run the stored one that trained its parameters.

    Args:
        where: the checkpoint, for errors.
        own: groups of this run.
        stored: groups of the checkpoint, in any order.
        rates: whose rates count. With the run's own, groups that differ in nothing else need not be told apart.

    Raises:
        ConfigError: a group has none, or it cannot be told which.

    >>> stored = [{"wd_mult": 1.0, "max_lr": 1e-3}, {"wd_mult": 0.0, "max_lr": 1e-3}]
    >>> own = [{"wd_mult": 0.0, "max_lr": 5e-4}, {"wd_mult": 1.0, "max_lr": 5e-4}]
    >>> [group["wd_mult"] for group in counterparts("iter_2", own, stored, Rates.OWN)]
    [0.0, 1.0]
    """
    return [_counterpart(where, place, group, stored, rates) for place, group in enumerate(own)]


def _counterpart(where: str, place: int, group: Group, stored: Sequence[Group], rates: Rates) -> Group:
    for level in _LEVELS:
        found = [other for other in stored if level(other) == level(group)]
        if not found:
            continue
        if level is _exactly:
            # Megatron 0.12 knows groups by their place.
            return stored[place] if place < len(stored) and level(stored[place]) == level(group) else found[0]
        left_out = {*_COMPUTED, *_MARKS} - ({*RATES} if rates is Rates.STORED else set())
        kept = [{key: value for key, value in other.items() if key not in left_out} for other in found]
        if any(other != kept[0] for other in kept):
            raise ConfigError(
                f"{where}: {len(found)} groups of parameters fit the one with {_shown(group)}, and differ in more than "
                f"the rates that {Rates.OWN.value} sets; use the options of the run that was saved, or load only the "
                "weights with --no-load-optim"
            )
        return found[0]
    raise ConfigError(
        f"{where}: no parameters were trained with {_shown(group)}; this run trains some so; use the options of "
        "the run that was saved, or load only the weights with --no-load-optim"
    )


def _shown(group: Group) -> str:
    return ", ".join(f"{name} {value}" for name, value in marks(group).items() if value is not None)


def difference(own: Sequence[Group], stored: Sequence[Group]) -> str:
    """Say the first rate in which groups differ from their counterparts; empty where they have the same.

    >>> difference([{"max_lr": 5e-4}], [{"max_lr": 1e-3}])
    'max_lr 0.0005, in the checkpoint 0.001'
    """
    for group, other in zip(own, stored, strict=True):
        for name in RATES:
            (here,), (there,) = _values(group, (name,)), _values(other, (name,))
            if here != there:
                return f"{name} {here}, in the checkpoint {there}"
    return ""


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
