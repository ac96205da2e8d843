"""Makes a checkpoint of a published model, or of trees for MindSpeed-MM."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch

from vtp_plugin.checkpoint.format.checkpoint_files import itemsize
from vtp_plugin.checkpoint.format.contents import Part
from vtp_plugin.checkpoint.format.resolver import TRACKER
from vtp_plugin.checkpoint.format.shard_map import Strided, row_major
from vtp_plugin.checkpoint.hf.all_families import FAMILIES, rows_in_file, rows_of
from vtp_plugin.checkpoint.hf.hf_model import CARRIED, NOTE, RELEASE, HFModel, dump_note, settings
from vtp_plugin.checkpoint.hf.read_config import (
    CONFIG,
    carried_files,
    copy_carried,
    file_of,
    passed_over,
    read_config,
    read_model,
)
from vtp_plugin.checkpoint.hf.tensor_rows import (
    EMBEDDING,
    HEAD,
    Tensor,
    TensorRow,
    TensorShare,
    are_frequencies,
    empty_states,
    hf_shapes,
    is_frequencies,
    megatron_tensors,
    respelt,
)
from vtp_plugin.checkpoint.load.stored_optimizer import Elements, typed
from vtp_plugin.checkpoint.save.atomic_dir import make_folder, partial_of, remover, sync
from vtp_plugin.checkpoint.save.saving import LOCK
from vtp_plugin.checkpoint.tools.mm_trees import MMTrees
from vtp_plugin.checkpoint.tools.writer import (
    Ending,
    NewPiece,
    PiecePart,
    PieceWriter,
    Shards,
    Source,
    are_equal,
    cut_pieces,
    holding,
    is_writable,
    known_types,
    require_new,
    writing_to,
)
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import OUTPUT, WORD_EMBEDDING, GPTModel, ParameterRow
from vtp_plugin.plan.model.lora import Lora, arguments_of
from vtp_plugin.util.index_boxes import Box, intersect, whole_box
from vtp_plugin.util.typed_json import read_bytes

# What all Megatrons of the format know: 0.12 reads the last two as well.
_FORMAT: Final = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_MAX_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Import:
    """A planned import.

    Attributes:
        folder: folder of the published model, with its config.
        model: the model that it is.
        source: the reader of the weights.
        files: the files that hold them.
        pieces: the pieces of the new checkpoint.
        passed: fields of its config that are ignored, since they change nothing.
        lora: the adapters that are imported; None of a whole model.
    """

    folder: Path
    model: HFModel
    source: Source
    files: tuple[Path, ...]
    pieces: tuple[NewPiece, ...]
    passed: tuple[str, ...]
    lora: Lora | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(piece.num_bytes for piece in self.pieces)


def plan_import(folder: Path, target: Path) -> Import:
    """Plan an import: check all of a published model but its elements.

    Args:
        folder: folder of the model.
        target: folder for the new checkpoint.

    Raises:
        ConfigError: the model is unknown or damaged, or not what its config says; or the target holds something.
    """
    model, passed = begin_import(folder, target)
    shards = Shards(folder)
    shards.rename(respelt(shards.names, model))
    rows = rows_in_file(model, shards.names)
    left_out = [name for name in shards.names if is_frequencies(name) or (name == HEAD and model.is_tied)]
    refuse(_problems(shards, rows, model, left_out))
    tensors = [*megatron_tensors(rows, model)]
    refuse(_mixed(shards, tensors))
    refuse(problem for name in left_out for problem in _not_copied(shards, model, name))
    pieces = (
        piece for each in tensors for piece in cut_tensor(each, shards.dtype_of(each.shares[0].name), each.shares)
    )
    files = tuple(sorted(folder.glob("*.safetensors")))
    return Import(folder, model, shards, files, (*pieces, no_states(model)), passed)


def begin_import(folder: Path, target: Path) -> tuple[HFModel, tuple[str, ...]]:
    """Check all that an import needs besides weights.

    Args:
        folder: folder of the published model.
        target: folder for the new checkpoint.

    Returns:
        The model, and the fields of its config that change nothing.

    Raises:
        ConfigError: the model is unknown, or the target holds something.
    """
    require_new(target, but_for=(partial_of(Path(RELEASE)).name, CARRIED, LOCK))
    config = read_config(folder)
    model = read_model(config, folder / CONFIG)
    carried_files(folder)
    return model, tuple(passed_over(config, FAMILIES[model.family]))


def _problems(shards: Shards, rows: tuple[TensorRow, ...], model: HFModel, left_out: Sequence[str]) -> Iterator[str]:
    """Say where the tensors are not those that the config says; of many problems the first ones."""
    expected, names = hf_shapes(rows, model), {*shards.names}
    unknown = sorted(names - expected.keys() - {*left_out})
    missing = sorted(expected.keys() - names)
    way_out = "download all files again"
    if unknown:
        way_out += ", or, if transformers says that it misses none, load the model with it and use save_pretrained"
    if missing and unknown:
        problems = [f"{missing[0]} is missing, and {shards.stored_name(unknown[0])} is there"]
    else:
        problems = [f"{name} is missing" for name in missing]
        problems += [
            f"{shards.stored_name(name)} is no tensor of a model of the family {model.family}" for name in unknown
        ]
    problems += [
        f"{shards.stored_name(name)} has the shape {found}, and {shape} is expected"
        for name, shape in expected.items()
        if name in names and (found := shards.shape(name)) != shape
    ]
    for problem in problems[:_MAX_NAMED]:
        yield f"{shards.folder}: {problem}; {CONFIG} says which tensors there are; {way_out}"


def _not_copied(shards: Shards, model: HFModel, name: str) -> Iterator[str]:
    """Say where a tensor that is left out differs from what Megatron uses instead: then its values would be lost."""
    stored = shards.stored_name(name)
    if is_frequencies(name):
        shape = shards.shape(name)
        if shape != (model.kv_channels // 2,) or not are_frequencies(_values(shards, name), model):
            yield (
                f"{shards.folder}: {stored} holds other frequencies than rope_theta, rope_scaling and head_dim of "
                f"{CONFIG} give; transformers computes with those of {CONFIG}; correct {CONFIG}, or remove the tensor"
            )
    elif (how := _difference(shards, name, EMBEDDING)) is not None:
        yield (
            f"{shards.folder}: {CONFIG} ties the output layer to the embedding, and {stored} {how} {EMBEDDING}; "
            "transformers 5 computes with both, 4.54 to 4.57 with the embedding only; set tie_word_embeddings to "
            "false, or remove the tensor"
        )


def _difference(shards: Shards, name: str, other: str) -> str | None:
    """Say how a tensor differs from another; None of a copy."""
    shape, dtype = shards.shape(other), shards.dtype_of(other)
    if shards.dtype_of(name) != dtype:
        return f"has the type {shards.dtype_of(name)}, unlike"
    if shards.shape(name) != shape:
        return f"has the shape {shards.shape(name)}, unlike"
    one, two = (TensorShare(each, 0, whole_box(shape), 0) for each in (name, other))
    return None if are_equal(shards, [one], [two], shape, dtype) else "differs from"


def _values(shards: Shards, name: str) -> list[float]:
    """Read all elements of a small tensor."""
    whole = whole_box(shards.shape(name))
    found = typed(shards.read(TensorShare(name, 0, whole, 0), whole), shards.dtype_of(name))
    return found.double().tolist()


def _mixed(shards: Shards, tensors: list[Tensor]) -> Iterator[str]:
    for tensor in tensors:
        dtypes = sorted({shards.dtype_of(name) for name in {share.name for share in tensor.shares}})
        if len(dtypes) > 1:
            yield (
                f"{shards.folder}: {tensor.row.hf_names[0]} and others have the types {' and '.join(dtypes)}; Megatron "
                "stores them as one tensor; save the model with one type"
            )


def cut_tensor(tensor: Tensor, dtype: str, parts: Sequence[PiecePart]) -> Iterator[NewPiece]:
    """Cut a Megatron tensor into pieces, layer by layer and expert by expert.

    Args:
        tensor: the tensor.
        dtype: type of its elements.
        parts: the parts that it is made of, layer by layer.
    """
    num_lead = tensor.shares[0].num_lead
    key, *aliases = tensor.row.megatron_keys
    for lead, group in groupby(parts, key=lambda part: part.box[:num_lead]):
        of_lead = [*group]
        whole: Box = (*lead, *whole_box(tensor.shape[num_lead:]))
        for box in cut_pieces(whole, itemsize(dtype)):
            inside = tuple(part for part in of_lead if intersect(part.box, box) is not None)
            yield NewPiece(key, dtype, tensor.shape, box, parts=inside, aliases=tuple(aliases))


def no_states(model: HFModel) -> NewPiece:
    """Return what all layers store besides weights: the same bytes under all their keys."""
    first, *others = empty_states(rows_of(model), model)
    return NewPiece(first, None, (), (), data=_saved([None]), aliases=tuple(others))


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write_import(plan: Import, target: Path, on_written: Callable[[int], None]) -> None:
    """Write the checkpoint. It appears as a whole.

    If the process is killed, the next attempt resumes; if it is told to stop, it removes what it has written.

    Args:
        plan: the planned import.
        target: folder for ``--load``.
        on_written: called with the bytes of each piece.

    Raises:
        ConfigError: the folder holds something, or cannot be written, or the process was told to stop.
    """
    release, carried = target / RELEASE, target / CARRIED
    writer = PieceWriter(plan.pieces, plan.source, release, _identity(plan))
    # The tracker first, since it names what goes.
    undo = remover(target, target / TRACKER, partial_of(release), release, carried)
    with holding(target):
        on_written(writer.find_written())
        with writing_to(target, undo):
            make_folder(carried)
            for copy in copy_carried(plan.folder, carried):
                sync(copy)
            sync(carried)
            writer.write(_ending(plan), on_written)


def _ending(plan: Import) -> Ending:
    arguments = {each.argument: each.value for each in settings(plan.model) if each.is_argument}
    # Older Megatrons ask which layout wrote it, and pass over the random states that are not there.
    layout = dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size"), 1)
    # What --use-checkpoint-args takes besides.
    free = {
        "max_position_embeddings": plan.model.max_positions,
        "attention_dropout": plan.model.dropout,
        "hidden_dropout": 0.0,
    }
    lora = {} if plan.lora is None else arguments_of(plan.lora)
    args = argparse.Namespace(**arguments, **layout, **free, **lora)
    # Before version 2 Megatron would reorder queries, keys and values.
    common = _saved({"args": args, "checkpoint_version": 3.0, "iteration": 0})
    files = {NOTE: dump_note(plan.model).encode(), "metadata.json": json.dumps(_FORMAT).encode()}
    return Ending(common=common, files=files)


def _identity(plan: Import) -> str:
    """Return what tells a model from others: its config, and names, lengths and times of its files."""
    told = hashlib.sha256(read_bytes(file_of(plan.folder, CONFIG)))
    for file in plan.files:
        told.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    return told.hexdigest()


_MAX_NAMED_OF_MM: Final = 3
_WAY_OUT: Final = "convert again, or give with --like the model that was converted"
# What some layers store besides weights.
_STATE: Final = "._extra_state"


def plan_import_mm(trees: Sequence[Path], like: Path, target: Path) -> Import:
    """Plan an import: check all of the trees but their elements.

    Args:
        trees: folder of the tree, or those of the edge's and the cloud's.
        like: folder of the published model that they were converted from, with its config.
        target: folder for the new checkpoint.

    Raises:
        ConfigError: the model is unknown, or the trees are damaged, of another model or of different lists; or the
            target holds something.
    """
    model, passed = begin_import(like, target)
    if model.vision is None:
        raise ConfigError(
            f"{like / CONFIG}: model_type is {model.family!r}; of MindSpeed-MM only trees of qwen2_5_vl are read; give "
            "the folder of such a model with --like"
        )
    rows = rows_of(model)
    begins = {f"{row.place.module}{row.place.layers}.": row.place.sizes(model) for row in rows if row.is_of_layers}
    found = MMTrees(trees, [*begins])
    where, rule = " and ".join(map(str, trees)), f"{CONFIG} of {like} says which tensors there are"
    elements = Elements(found.folder)
    for problems in (
        _problems_of_mm(found, rows, model, begins),
        _other_forms(found, rows, model),
        _other_head(found, rows, model, elements),
    ):
        refuse(f"{where}: {problem}; {rule}; {_WAY_OUT}" for problem in problems)
    pieces = [
        piece
        for tensor in megatron_tensors(rows, model)
        for piece in cut_tensor(tensor, _dtypes(found, tensor.row, model)[0], [*_parts(found, tensor.row, model)])
    ]
    return Import(like, model, elements, found.files, (*pieces, no_states(model)), passed)


def _problems_of_mm(
    found: MMTrees, rows: Sequence[TensorRow], model: HFModel, begins: Mapping[str, GPTModel]
) -> Iterator[str]:
    """Say where the tensors are not those of the model; of many problems the first ones."""
    counts = [
        f"{found.num_layers[begin]} layers of {begin.partition('.')[0]} instead of {sizes.num_layers}"
        for begin, sizes in begins.items()
        if found.num_layers[begin] != sizes.num_layers
    ]
    if counts:
        yield f"they hold {' and '.join(counts)}"
        return
    expected = {name for row in rows for name in _names(row, model)}
    ignored = {_head_name(rows)} if model.is_tied else set[str]()
    here = {name for name in found.tensors if not name.endswith(_STATE)} - ignored
    problems = [f"{name} is missing" for name in sorted(expected - here)]
    problems += [f"{name} is no tensor of a model of the family {model.family}" for name in sorted(here - expected)]
    yield from problems[:_MAX_NAMED_OF_MM]


def _other_forms(found: MMTrees, rows: Sequence[TensorRow], model: HFModel) -> Iterator[str]:
    """Say which tensors have another shape or type than their ranks should hold; of many problems the first ones."""
    problems: list[str] = []
    for row in rows:
        for name in _names(row, model):
            held = found.tensors[name]
            for rank, part in enumerate(held):
                if (shape := _shape(row.parameter, row.place.sizes(model), len(held))) != part.shape:
                    rule = "which that number does not divide" if -1 in shape else f"and {shape} is expected"
                    problems.append(f"{name} has the shape {part.shape} on rank {rank} of {len(held)}, {rule}")
        if len(dtypes := _dtypes(found, row, model)) > 1 or not is_writable(dtypes[0]):
            problems.append(
                f"{_names(row, model)[0]} has the type {' and '.join(dtypes)}, not one of {', '.join(known_types())}"
            )
    yield from problems[:_MAX_NAMED_OF_MM]


def _other_head(found: MMTrees, rows: Sequence[TensorRow], model: HFModel, elements: Elements) -> Iterator[str]:
    """Say where a tied model's trees have an output layer that is not the embedding: its values would be lost."""
    if not model.is_tied or (name := _head_name(rows)) not in found.tensors:
        return
    row = next(row for row in rows if row.parameter is WORD_EMBEDDING)
    (words,), dtype = _names(row, model), _dtypes(found, row, model)[0]
    if {part.dtype for part in found.tensors[name]} == {dtype}:
        ours, theirs = ([*_parts(found, each, model)] for each in (row, replace(row, parameter=OUTPUT)))
        if are_equal(elements, ours, theirs, row.shapes(model)[0], dtype):
            return
    yield f"{name} differs from {words}, and {CONFIG} ties them"


def _head_name(rows: Sequence[TensorRow]) -> str:
    row = next(row for row in rows if row.parameter is WORD_EMBEDDING)
    return row.place.module + OUTPUT.name


def _names(row: TensorRow, model: HFModel) -> list[str]:
    """Return the names that a row's tensors have in the model, layer by layer."""
    place, name = row.place, row.parameter.name
    if not row.is_of_layers:
        return [place.module + name]
    return [f"{place.module}{place.layers}.{layer}.{name}" for layer in range(place.sizes(model).num_layers)]


def _dtypes(found: MMTrees, row: TensorRow, model: HFModel) -> list[str]:
    return sorted({part.dtype for name in _names(row, model) for part in found.tensors[name]})


def _parts(found: MMTrees, row: TensorRow, model: HFModel) -> Iterator[Part]:
    """Yield the parts that a checkpoint's tensor is made of, layer by layer and rank by rank."""
    for layer, name in enumerate(_names(row, model)):
        lead = [(layer, layer + 1)] * row.is_of_layers
        held = found.tensors[name]
        for rank, part in enumerate(held):
            strides = row_major(part.shape)
            for first, box in _boxes(row.parameter, row.place.sizes(model), len(held), rank):
                strided = Strided(first * strides[0], (*(0 for _ in lead), *strides))
                yield Part((*lead, *box), part.extent, strided)


def _boxes(parameter: ParameterRow, sizes: GPTModel, number: int, rank: int) -> Iterator[tuple[int, Box]]:
    """Yield the boxes of a tensor that a rank of several holds, each with its first row in the rank's part."""
    lengths, rest = parameter.rows(sizes), whole_box(parameter.rest(sizes))
    if parameter.cut == "rows":
        at = first = 0
        for length in (sum(lengths),) if parameter.is_by_group else lengths:
            share = length // number
            yield first, ((at + rank * share, at + (rank + 1) * share), *rest)
            at, first = at + length, first + share
    elif parameter.cut == "columns":
        share = rest[0][1] // number
        yield 0, ((0, sum(lengths)), (rank * share, (rank + 1) * share), *rest[1:])
    elif rank == 0:
        yield 0, ((0, sum(lengths)), *rest)


def _shape(parameter: ParameterRow, sizes: GPTModel, number: int) -> tuple[int, ...]:
    """Return the shape of a rank's part; it may not be a whole number of rows."""
    rows, rest = sum(parameter.rows(sizes)), parameter.rest(sizes)
    if parameter.cut == "rows":
        return (rows // number if rows % number == 0 else -1, *rest)
    if parameter.cut == "columns":
        return (rows, rest[0] // number if rest[0] % number == 0 else -1, *rest[1:])
    return (rows, *rest)
