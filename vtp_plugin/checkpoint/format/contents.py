"""What a checkpoint holds: its entries, their common parts and stored values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.checkpoint_files import COMMON_FILE, load_object, tensors_inside
from vtp_plugin.checkpoint.format.index import DamagedError, Extent, Index, StoredTensor, read_index
from vtp_plugin.checkpoint.format.infer_map import check_map, infer_map
from vtp_plugin.checkpoint.format.plan_copies import Stored
from vtp_plugin.checkpoint.format.resolver import (
    BY_BUCKET,
    BY_BUCKET_OLDER,
    BY_RANK,
    IN_BUCKETS,
    PLAIN,
    TYPE,
    stored_optimizers,
)
from vtp_plugin.checkpoint.format.shard_map import (
    MAP,
    Block,
    ShardSpec,
    StoredRange,
    Strided,
    boxes_between,
    load_map,
    row_major,
)
from vtp_plugin.checkpoint.format.site_part import read_part
from vtp_plugin.errors import ConfigError, PlanError, VtpError, refuse
from vtp_plugin.util.index_boxes import Box, box_shape, format_box, intersect, overlaps, volume, whole_box

WEIGHT: Final = "weight"
"""The state that a parameter of the model is."""
MASTER: Final = "master"
"""The state that is the optimizer's own copy of a weight, whatever a checkpoint calls it."""

_BUCKET: Final = re.compile(r"(.*\.bucket_idx_\d+)\.(\w+)")
_BY_NAME: Final = re.compile(r"((?:chained_\d+\.)?)optimizer\.state\.(\w+)\.(.+)")
_OBJECT_OF_RANK: Final = re.compile(
    r"((?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.param_state/shard_.*"
)
_OF_A_GROUP: Final = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.(\w+)/shard_.*")
_MASTERS: Final = ("param", "fp32_param", "master_param")


@dataclass(frozen=True, slots=True)
class Part:
    """A stored box of a whole parameter.

    Attributes:
        box: the box, in coordinates of the whole parameter.
        extent: the bytes of a file that hold the tensor with its elements.
        strided: where its elements lie in that tensor.
    """

    box: Box
    extent: Extent
    strided: Strided


@dataclass(frozen=True, slots=True)
class Whole:
    """A parameter's weight, or one of its optimizer states.

    Attributes:
        shape: shape of the whole parameter.
        parts: called for the parts that it is stored in.
        chain: prefix of its optimizer's keys, where there are several optimizers.
    """

    shape: tuple[int, ...]
    parts: Callable[[], tuple[Part, ...]]
    chain: str = ""


class Contents:
    """A checkpoint.

    What is read is read once, and the map is checked once, however often it is asked for.

    Args:
        folder: folder of the checkpoint, which holds its index.
        index: its index, if the caller has read it.

    Attributes:
        folder: folder of the checkpoint.
        index: the checkpoint's index.
        common: what all ranks share, such as the arguments; empty where it is not stored.
        form: format in which the optimizer is stored, in Megatron's words, or ``plain``; None without an optimizer.
        has_map: whether the checkpoint has a map of its buckets.

    Raises:
        ConfigError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, index: Index | None = None) -> None:
        self.folder = folder
        self.index = read_index(folder) if index is None else index
        self.common = _common(self.index)
        with taking(folder):
            require_numbers(self.arguments)
            self.form = _form(self.index, self.common)
        self.has_map = os.path.lexists(folder / MAP)

    def __repr__(self) -> str:
        return f"<checkpoint {self.folder}>"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the run that wrote it; empty where they are not stored."""
        return getattr(self.common.get("args"), "state", None) or {}

    def weights(self) -> dict[str, Whole]:
        """Return the weights, by name."""
        return {key: _whole(tensor) for key, tensor in self.index.tensors.items() if kind_of(key) == WEIGHT}

    def states(self) -> dict[tuple[str, str], Whole]:
        """Return the optimizer's tensors, by state and name of the parameter.

        Raises:
            ConfigError: it is not known which parameters they belong to.
        """
        if self.form in IN_BUCKETS:
            with taking(self.folder):
                return self._states_of_buckets()
        named = ((_BY_NAME.fullmatch(key), tensor) for key, tensor in self.index.tensors.items())
        return {
            (_kind(match.group(2)), match.group(3)): _whole(tensor, match.group(1))
            for match, tensor in named
            if match is not None
        }

    def stored(self) -> Stored:
        """Return where the parameters lie, as the map says, or an inferred one, which the master weights alone prove.

        Raises:
            ConfigError: the map does not fit what is stored.
        """
        with taking(self.folder):
            return self._stored

    @cached_property
    def _stored(self) -> Stored:
        is_joined = self.form == BY_RANK
        if (buckets := load_map(self.folder / MAP)) is None:
            weights = {key: tensor for key, tensor in self.index.tensors.items() if kind_of(key) == WEIGHT}
            try:
                buckets = tuple(infer_map(weights, self.pieces, self.arguments, is_joined=is_joined))
            except PlanError as error:
                raise no_map(self.folder, str(error)) from None
        is_part = read_part(self.folder) is not None
        refuse(check_map(str(self.folder / MAP), buckets, self.pieces, is_joined=is_joined, is_part=is_part))
        return Stored(buckets, self.pieces)

    @cached_property
    def pieces(self) -> list[StoredRange]:
        """The pieces of all buckets, as their master weights are stored."""
        return [
            StoredRange(key, box[0][0], box[0][1] - box[0][0])
            for key, tensors in self.tensors_of_buckets.items()
            for box, _ in next(tensors[name] for name in _MASTERS if name in tensors).extents
        ]

    def steps(self) -> list[float]:
        """Return how many steps the optimizer has made; several numbers if groups of parameters differ."""
        with taking(self.folder):
            steps = [group.get("step") for group in self.groups()]
            steps += _inner(self.common.get("optimizer"), "common_step")
            return sorted({float(step) for step in steps if step is not None})

    def groups(self) -> Iterator[Mapping[str, Any]]:
        """Yield the groups of parameters of all optimizers."""
        for groups in _inner(self.common.get("optimizer"), "param_groups"):
            yield from groups
        for name, value in self.objects_of_groups():
            if name == "optimizer":
                yield from value["param_groups"]

    def objects_of_groups(self) -> Iterator[tuple[str, Any]]:
        """Yield the object that each data-parallel group has stored beside its tensors, with its name."""
        for key, extent in self.index.objects.items():
            match = _OF_A_GROUP.fullmatch(key)
            if match is not None and match.group(1) in ("optimizer", "grad_scaler"):
                yield match.group(1), _load(self.folder, extent)[0]

    @cached_property
    def tensors_of_buckets(self) -> Mapping[str, Mapping[str, StoredTensor]]:
        """The tensors of every bucket, by its key and their states."""
        found: dict[str, dict[str, StoredTensor]] = {}
        for key, tensor in self.index.tensors.items():
            if match := _BUCKET.fullmatch(key):
                found.setdefault(match.group(1), {})[match.group(2)] = tensor
        for key, extent in self.index.objects.items():
            for name, inside, dtype, shape in self._tensors_of_rank(key, extent):
                found.setdefault(name, {})[inside.path[-1]] = StoredTensor(dtype, shape, ((whole_box(shape), inside),))
        return found

    def extents_of_buckets(self) -> dict[tuple[str, str, int], Extent]:
        """Return the bytes of every piece of all buckets, by bucket, state, and offset in the bucket."""
        with taking(self.folder):
            return {
                (key, state, box[0][0]): extent
                for key, tensors in self.tensors_of_buckets.items()
                for state, tensor in tensors.items()
                for box, extent in tensor.extents
            }

    def _tensors_of_rank(self, key: str, extent: Extent) -> Iterator[tuple[str, Extent, str, tuple[int, ...]]]:
        """Yield the buffers in an object of a data-parallel group, each as one bucket, with its key."""
        if match := _OBJECT_OF_RANK.fullmatch(key):
            with _reading(self.folder, extent):
                for inside, dtype, shape in tensors_inside(self.folder, extent):
                    _, number, types, _ = inside.path
                    yield f"{match.group(1)}.gbuf_idx_{number}.dtype_{types}.bucket_idx_0", inside, dtype, shape

    def _states_of_buckets(self) -> dict[tuple[str, str], Whole]:
        stored, extents = self._stored, self.extents_of_buckets()

        def parts(state: str, name: str, shape: tuple[int, ...]) -> tuple[Part, ...]:
            shard = ShardSpec(name=name, shape=shape, blocks=(Block(whole_box(shape), Strided(0, row_major(shape))),))
            copies = stored.fill(shard, 0, shard.numel)
            try:
                return tuple(
                    Part(copy.box, extents[copy.piece.key, state, copy.piece.offset], copy.source) for copy in copies
                )
            except KeyError:
                raise ConfigError(
                    f"{self.folder}: {state} of {name} is not stored in the pieces of its master weight; all states of "
                    "a bucket are cut alike; copy the checkpoint again, or take another one"
                ) from None

        return {
            (_kind(state), part.shard.name): Whole(
                part.shard.shape,
                partial(parts, state, part.shard.name, part.shard.shape),
                bucket.key[: bucket.key.index("optimizer.")],
            )
            for bucket in stored.buckets.values()
            for part in bucket.parts
            for state in sorted(self.tensors_of_buckets[bucket.key])
        }


def no_map(folder: Path, problem: str) -> ConfigError:
    """Make the error that the positions of parameters in a checkpoint's buckets are not known.

    Args:
        folder: folder of the checkpoint.
        problem: why it could not be inferred.
    """
    return ConfigError(
        f"{folder / MAP} is missing, and where the optimizer's parameters lie cannot be worked out: {problem}; the "
        "order is known of GPT models of Megatron 0.15 to 0.19 only; load it in the layout that wrote it and save it "
        "with this plugin, or load only the weights with --no-load-optim (diff: --weights-only)"
    )


def kind_of(key: str) -> str:
    """Return which state a stored tensor is.

    >>> kind_of("optimizer.state.fp32_param.output_layer.weight"), kind_of("output_layer.weight")
    ('master', 'weight')
    """
    if match := _BUCKET.fullmatch(key):
        return _kind(match.group(2))
    match = _BY_NAME.fullmatch(key)
    return WEIGHT if match is None else _kind(match.group(2))


def name_of(key: str) -> str:
    """Return the name of the parameter of a stored tensor that is no bucket.

    >>> name_of("optimizer.state.exp_avg.output_layer.weight"), name_of("output_layer.weight")
    ('output_layer.weight', 'output_layer.weight')
    """
    match = _BY_NAME.fullmatch(key)
    return key if match is None else match.group(3)


def _kind(state: str) -> str:
    return MASTER if state in _MASTERS else state


def _whole(tensor: StoredTensor, chain: str = "") -> Whole:
    if tensor.flattened is not None:
        return Whole(tensor.flattened, lambda: tuple(_parts_of_flat(tensor)), chain)
    return Whole(
        tensor.shape,
        lambda: tuple(Part(box, extent, Strided(0, row_major(box_shape(box)))) for box, extent in tensor.extents),
        chain,
    )


def _parts_of_flat(tensor: StoredTensor) -> Iterator[Part]:
    """Yield the parts of a tensor that is stored as a grid of blocks, each of them flat, along the last dimension."""
    assert tensor.flattened is not None
    grid = tensor.shape[:-1]
    block = tuple(length // count for length, count in zip(tensor.flattened, grid, strict=True))
    for box, extent in tensor.extents:
        corner = tuple(start * length for (start, _), length in zip(box, block, strict=False))
        first, last = box[-1]
        for inner in boxes_between(block, first, last):
            strided = Strided(0, row_major(block)).at(inner, whole_box(block)).moved(-first)
            yield Part(tuple((a + at, b + at) for (a, b), at in zip(inner, corner, strict=True)), extent, strided)


def _common(index: Index) -> Mapping[str, Any]:
    """Read what all ranks share: an object, or before Megatron 0.19 a file of its own."""
    key = next((key for key in index.objects if key.startswith("common_state/")), None)
    if key is None and not os.path.lexists(index.folder / COMMON_FILE):
        return {}
    stored = _load(index.folder, Extent(COMMON_FILE) if key is None else index.objects[key])
    with taking(index.folder):
        common = stored if key is None else stored[0]
        iteration = common.get("iteration")
        if iteration is not None and type(iteration) is not int:
            raise ValueError("its iteration is no number")
        return common


def _load(folder: Path, extent: Extent) -> Any:
    with _reading(folder, extent):
        return load_object(folder, extent)


@contextmanager
def _reading(folder: Path, extent: Extent) -> Iterator[None]:
    try:
        yield
    except DamagedError as error:
        raise ConfigError(
            f"{folder / extent.file} {error}; without it this checkpoint cannot be read; copy it again"
        ) from None


def _form(index: Index, common: Mapping[str, Any]) -> str | None:
    if any(map(_BUCKET.fullmatch, index.tensors)):
        is_older = any(each[TYPE] == BY_BUCKET_OLDER for each in stored_optimizers(common))
        return BY_BUCKET_OLDER if is_older else BY_BUCKET
    if any(map(_OBJECT_OF_RANK.fullmatch, index.objects)):
        return BY_RANK
    if not any(map(_BY_NAME.fullmatch, index.tensors)):
        return None
    return next((each[TYPE] for each in stored_optimizers(common)), PLAIN)


def _inner(value: Any, name: str) -> Iterator[Any]:
    """Yield what is called so, in dictionaries inside dictionaries."""
    if not isinstance(value, Mapping):
        return
    read: Mapping[Any, Any] = value
    for key, each in read.items():
        if key == name:
            yield each
        else:
            yield from _inner(each, name)


def pairs(a: Whole, b: Whole) -> tuple[list[tuple[Part, Part, Box]], str | None]:
    """List the common boxes of two tensors, with the part of each that holds them; also say why they are not all."""
    ours, theirs = a.parts(), b.parts()
    parts = (*ours, *theirs)
    found: list[tuple[Part, Part, Box]] = []
    # A number has no dimension along which its parts could be sorted; it has one part.
    for i, j in overlaps([part.box for part in parts]) if a.shape else ((0, 1),):
        if (i < len(ours)) == (j < len(ours)):
            return [], f"{format_box(parts[i].box)} is stored twice in {'A' if i < len(ours) else 'B'}"
        common = intersect(parts[i].box, parts[j].box)
        assert common is not None
        found.append((parts[i], parts[j], common))
    count, size = sum(volume(box) for _, _, box in found), math.prod(a.shape)
    problem = None if count == size else f"only {count} of {size} elements are stored in both"
    return sorted(found, key=lambda pair: (pair[0].extent.file, pair[0].extent.offset, pair[2])), problem


_SIZES: Final = ("parallel_size", "vtp_size_list", "vtp_cp_list", "vtp_dp_list", "vtp_ep_list", "vtp_etp_list")
_MAX_SIZE: Final = 1 << 24  # ranks


@contextmanager
def taking(folder: Path) -> Iterator[None]:
    """Run code that relies on the values that Megatron stores in a checkpoint; if they are others, say so."""
    try:
        yield
    except VtpError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = ascii(f"{type(error).__name__}: {error}")[1:100]
        raise ConfigError(
            f"{folder} holds other values than Megatron stores ({reason}); nobody can read such a checkpoint; copy it "
            "again, or take another one"
        ) from error


def require_numbers(arguments: Mapping[str, Any]) -> None:
    """Check that sizes in stored arguments are numbers.

    Raises:
        ValueError: one is none.
    """
    for name, value in arguments.items():
        if not isinstance(name, str) or not name.endswith(_SIZES) or value is None:
            continue
        values = value if name.endswith("_list") and isinstance(value, list | tuple) else [value]
        if any(type(each) is not int or not 0 <= each <= _MAX_SIZE for each in values):
            raise ValueError(f"{name} is no size")
