"""Exports a checkpoint of any layout and format as a Hugging Face model, tensor by tensor, without Megatron."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vtp_plugin.checkpoint.format.checkpoint_files import itemsize
from vtp_plugin.checkpoint.format.contents import Contents, Part, Whole
from vtp_plugin.checkpoint.format.safe_pickle import PickledObject
from vtp_plugin.checkpoint.format.shard_map import Strided
from vtp_plugin.checkpoint.hf.all_families import rows_of
from vtp_plugin.checkpoint.hf.hf_model import (
    CARRIED,
    NOTE,
    Contradiction,
    HFModel,
    Note,
    contradictions,
    expected_settings,
    flat_entries,
    how_to_go_on,
    origin_of,
    read_note,
)
from vtp_plugin.checkpoint.hf.read_config import (
    CONFIG,
    carried_files,
    copy_carried,
    known_words,
    read_config,
    read_model,
)
from vtp_plugin.checkpoint.hf.tensor_rows import Tensor, TensorShare, hf_shapes, megatron_tensors
from vtp_plugin.checkpoint.load.stored_optimizer import Elements
from vtp_plugin.checkpoint.save.atomic_dir import InParts
from vtp_plugin.checkpoint.tools.peft import Adapters, merge_into_base
from vtp_plugin.checkpoint.tools.writer import (
    HF_INDEX,
    SINGLE,
    NewTensor,
    are_equal,
    bytes_of,
    cut_pieces,
    index_text,
    is_writable,
    known_types,
    read_box,
    require_new,
    write_header,
    written_beside,
)
from vtp_plugin.errors import ConfigError, refuse
from vtp_plugin.plan.model.gpt_model import WORD_EMBEDDING
from vtp_plugin.plan.model.lora import is_adapter
from vtp_plugin.util.typed_json import read_json

# Tokenizers that do not look at --vocab-size.
_OWN_WORDS: Final = (
    *("HuggingFaceTokenizer", "SFTTokenizer", "MultimodalTokenizer", "GPT2BPETokenizer", "Llama2Tokenizer"),
    *("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"),
)
# Of a config that has one for each part of a model.
_PARTS: Final = ("text_config", "vision_config")
_MAX_NAMED: Final = 3
# As transformers cuts them; a file is read as a whole when it is copied.
MAX_FILE_BYTES: Final = 5_000_000_000


@dataclass(slots=True)
class _Stored:
    """A Megatron tensor as a checkpoint stores it.

    Attributes:
        tensor: the tensor.
        dtype: type of its elements.
        parts: the parts that it is stored in, by layer and expert.
    """

    tensor: Tensor
    dtype: str
    parts: Mapping[tuple[int, ...], list[Part]]

    def parts_of(self, share: TensorShare) -> list[Part]:
        """Return the parts that may hold a share."""
        return self.parts[tuple(start for start, _ in share.box[: share.num_lead])]


@dataclass(frozen=True, slots=True)
class Export:
    """A planned export.

    Attributes:
        contents: the checkpoint.
        model: the model that it is.
        like: folder with the config and the tokenizer.
        files: the tensors of every new file.
        places: for each Hugging Face tensor, its shares and where they are stored.
        num_unproved: number of rows that are left out although nobody says how many words the run had.
        said: what a reader is told of the config; may be empty.
        adapters: what is added to the weights, in fp32, before each is rounded once; None to add nothing.
    """

    contents: Contents
    model: HFModel
    like: Path
    files: Mapping[str, list[NewTensor]]
    places: Mapping[str, list[tuple[TensorShare, _Stored]]] = field(repr=False)
    num_unproved: int = 0
    said: str = ""
    adapters: Adapters | None = field(default=None, repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(tensor.num_bytes for held in self.files.values() for tensor in held)


def find_like(contents: Contents, source: Path) -> Path:
    """Find the config and the tokenizer that an import has left beside a checkpoint, or beside what its run loaded.

    Raises:
        ConfigError: there are none.
    """
    for candidate in _origins(contents, source):
        if (candidate / CARRIED / CONFIG).is_file():
            return candidate / CARRIED
    raise ConfigError(
        f"{contents.folder} was not imported here, nor was what its run loaded; {CONFIG} and the tokenizer come from "
        "the published model; give its folder with --like"
    )


def _origins(contents: Contents, source: Path) -> Iterator[Path]:
    """Yield the folders in which the import may lie that a checkpoint is, or that its run began with."""
    yield from (contents.folder.parent, source)
    if (origin := origin_of(None, contents.arguments)) is not None:
        yield Path(origin["folder"])
    if isinstance(loaded := contents.arguments.get("load"), str):
        yield Path(loaded)


def plan_export(contents: Contents, like: Path, target: Path, adapters: Adapters | None = None) -> Export:
    """Plan an export: check all of a checkpoint but its elements.

    Args:
        contents: the checkpoint.
        like: folder with the config of the model.
        target: folder of the new model.
        adapters: what is added to the weights.

    Raises:
        ConfigError: the checkpoint is another model, or has what a published model has not, or the target holds
            something.
    """
    require_new(target)
    model = read_model(read_config(like), like / CONFIG)
    carried_files(like)
    origin, note = _note_of(contents)
    said = _compared(contents, model, like, origin, note)
    weights, problems = contents.weights(), list[str]()
    if adapters is not None:
        weights = {key: whole for key, whole in weights.items() if not is_adapter(key)}
    words = next(key for row in rows_of(model) if row.parameter is WORD_EMBEDDING for key in row.megatron_keys)
    rows = next((each.shape[0] for key, each in weights.items() if key == words and each.shape), 0)
    refuse(_words_cut_off(contents, rows, model, like, note))
    refuse(_both_names(contents, weights, model))
    refuse(
        f"{contents.folder}: {key} belongs to an adapter; a published model has none; merge it "
        "first, and save it, or export it with --merge or --peft"
        for key in [key for key in weights if "lora_" in key or "adapter" in key][:1]
    )
    stored = [
        found
        for tensor in megatron_tensors(rows_of(model), model)
        if (found := _find(contents, weights, tensor, model, problems)) is not None
    ]
    problems += [f"{key} is no tensor of such a model" for key in weights]
    refuse(
        f"{contents.folder}: {problem}; {like / CONFIG} describes another model; give its own with --like"
        for problem in problems[:_MAX_NAMED]
    )
    places: dict[str, list[tuple[TensorShare, _Stored]]] = {}
    for each in stored:
        for share in each.tensor.shares:
            places.setdefault(share.name, []).append((share, each))
    shapes = hf_shapes(rows_of(model), model)
    tensors = [NewTensor(name, places[name][0][1].dtype, shape) for name, shape in sorted(shapes.items())]
    is_unproved = rows > model.vocab and not _words_of_run(contents, like, note)[1]
    return Export(
        contents, model, like, plan_files(tensors), places, rows - model.vocab if is_unproved else 0, said, adapters
    )


def plan_files(tensors: Sequence[NewTensor], max_bytes: int = MAX_FILE_BYTES) -> dict[str, list[NewTensor]]:
    """Share out tensors among files, in their order.

    >>> tensors = [NewTensor(name, "float32", (2,)) for name in "abc"]
    >>> {file: [tensor.name for tensor in held] for file, held in plan_files(tensors, 16).items()}
    {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    >>> [*plan_files(tensors)]
    ['model.safetensors']
    """
    groups: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.num_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.num_bytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _note_of(contents: Contents) -> tuple[Path, Note] | tuple[None, None]:
    """Return the import that a checkpoint is, or that its run began with, and its note, if they are here."""
    for folder in _origins(contents, contents.folder):
        if (note := read_note(str(folder))) is not None:
            return folder, note
    return None, None


def _compared(contents: Contents, model: HFModel, like: Path, origin: Path | None, note: Note | None) -> str:
    """Refuse a checkpoint that was trained as another model than the config says.

    Returns:
        What is to be said where nobody asked for that, or where it is another one on purpose; may be empty.
    """
    told = {**contents.arguments, **flat_entries(_json_model(contents))}
    found = [*contradictions(expected_settings(model), told)]
    is_meant = note is not None and note.is_aside
    refuse(
        f"{contents.folder}: {each.problem}; {like / CONFIG} says so; {_way_out(each, origin)}"
        for each in found
        if not (each.setting.is_of_function and is_meant)
    )
    if not is_meant:
        return "" if note is not None or like.name != CARRIED else f"{like.parent} has no {NOTE}; {like} was taken"
    where = f" ({'; '.join(each.problem for each in found)})" if found else ""
    return f"the note of {origin} was left aside: {like / CONFIG} is copied as it is, whatever the run was given{where}"


def _way_out(found: Contradiction, origin: Path | None) -> str:
    """Say how a checkpoint is exported whose run had another flag than its config says."""
    way_out = "give the config of this model with --like"
    if found.setting.others:  # no config says that
        way_out = f"{found.way_out} in a run that resumes from it, and export what that saves"
    if origin is not None and found.setting.is_of_function:
        way_out += f", or, where you mean it, {how_to_go_on(origin)}"
    return way_out


def _json_model(contents: Contents) -> Mapping[str, Any]:
    """Return what MindSpeed-MM's JSON file of the run's model said; nothing of another run."""

    def plain(value: Any) -> Any:
        value = value.state if isinstance(value, PickledObject) else value
        return {str(name): plain(each) for name, each in value.items()} if isinstance(value, Mapping) else value

    read = plain(contents.arguments.get("mm"))
    model = read.get("model") if isinstance(read, Mapping) else None
    return model if isinstance(model, Mapping) else {}


def _words_of_run(contents: Contents, like: Path, note: Note | None) -> tuple[list[tuple[int, str]], bool]:
    """Return how many words a run had, and who says so; and whether all do that could know more."""
    own, size, path = (contents.arguments.get(name) for name in ("tokenizer_type", "vocab_size", "tokenizer_model"))
    takes_size = own not in _OWN_WORDS
    claims = [(size, "--vocab-size of its run says")] if takes_size and isinstance(size, int) else []
    is_known = bool(claims)
    folders = [like, *([Path(path)] if isinstance(path, str) else [])]
    for folder in folders:
        if (known := known_words(folder)) is not None:
            claims.append((known[0], f"the tokenizer's {folder / known[1]} says"))
            is_known |= folder == folders[-1]  # of its run, if it names one
    if note is not None:
        claims.append((note.vocab, "the import had"))
    elif (origin := origin_of(None, contents.arguments)) is not None:  # its folder is gone
        claims.append((origin["vocab"], "the import had"))
    return claims, is_known


def _words_cut_off(contents: Contents, rows: int, model: HFModel, like: Path, note: Note | None) -> Iterator[str]:
    """Say where rows that are left out may be more than padding, as the run or a tokenizer knows more words."""
    number, who = max(_words_of_run(contents, like, note)[0], default=(0, ""))
    if rows > model.vocab and number > model.vocab:
        yield (
            f"{contents.folder}: {who} {number} tokens, and {like / CONFIG} has vocab_size {model.vocab}; of {rows} "
            f"rows those above are left out, and these are not all padding; give with --like a folder whose {CONFIG} "
            f"has vocab_size {min(number, rows)}"
        )


def _both_names(contents: Contents, weights: Mapping[str, Whole], model: HFModel) -> Iterator[str]:
    """Say where a tensor is stored under two names with different elements: an import has both, a run saves one."""
    elements = Elements(contents.folder)
    for row in rows_of(model):
        first, *others = [key for key in row.megatron_keys if key in weights] or [""]
        for other in others:
            one, two = weights[first], weights[other]
            shape, dtype = one.shape, contents.index.tensors[first].dtype
            is_alike = (shape, dtype) == (two.shape, contents.index.tensors[other].dtype)
            if not is_alike or not are_equal(elements, one.parts(), two.parts(), shape, dtype):
                yield (
                    f"{contents.folder}: {first} and {other} differ; a published model has one of them; load the "
                    "checkpoint in a run and save it, which keeps what its layers use"
                )


def _find(
    contents: Contents, weights: dict[str, Whole], tensor: Tensor, model: HFModel, problems: list[str]
) -> _Stored | None:
    """Find a Megatron tensor, remove its keys from ``weights``, and add what is wrong with it to ``problems``."""
    found = _keys(weights, tensor, model)
    if not found:
        problems.append(f"{tensor.row.megatron_keys[0]} is missing")
        return None
    parts: dict[tuple[int, ...], list[Part]] = defaultdict(list)
    num_lead = tensor.shares[0].num_lead
    for layer, key in found:
        whole = weights[key]
        shape = whole.shape if layer is None else (tensor.shape[0], *whole.shape)
        if not _fits(shape, tensor):
            problems.append(f"{key} has the shape {whole.shape}, and {tensor.shape} is expected")
            return None
        for part in whole.parts():
            full = part if layer is None else _in_layer(part, layer)
            for lead in _corners(full, num_lead):
                parts[lead].append(full)
    dtypes = {contents.index.tensors[key].dtype for _, key in found}
    for key in (*(key for _, key in found), *tensor.row.megatron_keys):
        weights.pop(key, None)
    if len(dtypes) > 1 or not is_writable(next(iter(dtypes))):
        problems.append(
            f"{found[0][1]} has the type {' and '.join(sorted(dtypes))}, not one of {', '.join(known_types())}"
        )
        return None
    return _Stored(tensor, dtypes.pop(), parts)


def _keys(weights: Mapping[str, Whole], tensor: Tensor, model: HFModel) -> list[tuple[int | None, str]]:
    """Return the key of a Megatron tensor, or the keys that hold one of its layers each, with the layer."""
    for key in tensor.row.megatron_keys:
        if key in weights:
            return [(None, key)]
        # Where kinds of layers differ, Megatron stores each layer on its own.
        num_layers = tensor.row.place.sizes(model).num_layers
        single = [tensor.row.place.key_of_layer(key, layer) for layer in range(num_layers)]
        if all(each in weights for each in single):
            return [*enumerate(single)]
    return []


def _fits(shape: tuple[int, ...], tensor: Tensor) -> bool:
    """Tell whether a shape is that of a tensor, but for words that Megatron adds."""
    return shape == tensor.shape or (
        tensor.row.parameter.is_padded and shape[1:] == tensor.shape[1:] and shape[0] > tensor.shape[0]
    )


def _in_layer(part: Part, layer: int) -> Part:
    """Return a part of a layer's own tensor as one of all layers."""
    strided = Strided(part.strided.offset, (0, *part.strided.strides))
    return Part(((layer, layer + 1), *part.box), part.extent, strided)


def _corners(part: Part, num_lead: int) -> Iterator[tuple[int, ...]]:
    """Yield layer and expert of everything that a part holds some of."""
    corners: list[tuple[int, ...]] = [()]
    for start, stop in part.box[:num_lead]:
        corners = [(*corner, at) for corner in corners for at in range(start, stop)]
    yield from corners


def write_export(plan: Export, target: Path, on_written: Callable[[int], None]) -> None:
    """Write the model. It appears as a whole.

    Args:
        plan: the planned export.
        target: folder of the new model.
        on_written: called with the bytes of each slab.

    Raises:
        ConfigError: the folder holds something, or cannot be written, or the checkpoint is damaged.
    """
    elements = Elements(plan.contents.folder)
    with written_beside(target) as part:
        for name, tensors in plan.files.items():
            with (part / name).open("wb") as file:
                write_header(file, tensors)
                for tensor in tensors:
                    for data in _elements(elements, tensor.name, plan.places[tensor.name], plan.adapters):
                        InParts(file).write(data)
                        on_written(len(data))
        if len(plan.files) > 1:
            (part / HF_INDEX).write_text(index_text(plan.files))
        copy_carried(plan.like, part)
        _set_dtype(part / CONFIG, plan.places["model.embed_tokens.weight"][0][1].dtype)


def _elements(
    elements: Elements, name: str, places: list[tuple[TensorShare, _Stored]], adapters: Adapters | None
) -> Iterator[memoryview]:
    """Yield the bytes of a Hugging Face tensor, slab by slab, with what adapters add."""
    for share, stored in sorted(places, key=lambda place: place[0].first):
        for box in cut_pieces(share.box, itemsize(stored.dtype)):
            found = read_box(elements, stored.parts_of(share), box, stored.dtype)
            row = stored.tensor.row.parameter
            if adapters is not None and row.is_routed:
                (layer, _), (expert, _), *rest = box
                if (added := adapters.scaled_of_expert(layer, row.module.rpartition(".")[2], expert)) is not None:
                    found = merge_into_base(found, added, tuple(rest))
            elif adapters is not None and (added := adapters.scaled_factors(name)) is not None:
                found = merge_into_base(found, added, share.hf_box(box))
            yield bytes_of(found.contiguous())


def _set_dtype(config: Path, dtype: str) -> None:
    """Let a config name the type that the weights have; it stays as it is where it does."""
    before = read_json(config)
    parts = {name: before[name] for name in _PARTS if isinstance(before.get(name), dict)}
    after = {**before, **{name: {**part, **_named(part, dtype)} for name, part in parts.items()}}
    after |= _named(before, dtype) or {"torch_dtype": dtype}
    if after != before:
        config.write_text(json.dumps(after, indent=2) + "\n")


def _named(fields: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Return the fields of a config that name a type, with this one."""
    return {name: dtype for name in ("dtype", "torch_dtype") if fields.get(name) is not None}
