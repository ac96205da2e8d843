"""Imports weights that MindSpeed-MM's converters have written, as a checkpoint that every layout loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from vtp_plugin.checkpoint.format.contents import Part
from vtp_plugin.checkpoint.format.shard_map import Strided, row_major
from vtp_plugin.checkpoint.hf.all_families import rows_of
from vtp_plugin.checkpoint.hf.hf_model import HFModel
from vtp_plugin.checkpoint.hf.side_files import CONFIG
from vtp_plugin.checkpoint.hf.tensor_rows import TensorRow, megatron_tensors
from vtp_plugin.checkpoint.load.elements import Elements
from vtp_plugin.checkpoint.tools.import_hf import Import, begin_import, cut_tensor, no_states
from vtp_plugin.checkpoint.tools.mm_trees import MMTrees
from vtp_plugin.checkpoint.tools.safetensors_files import is_writable, known_types
from vtp_plugin.checkpoint.tools.writer import are_equal
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import GPTModel
from vtp_plugin.plan.model.gpt_parameters import OUTPUT, WORD_EMBEDDING, ParameterRow
from vtp_plugin.util.index_boxes import Box, whole_box

_MAX_NAMED: Final = 3
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
        _problems(found, rows, model, begins),
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


def _problems(
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
    yield from problems[:_MAX_NAMED]


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
    yield from problems[:_MAX_NAMED]


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
