"""Looks into a checkpoint: verifies it, and tells whether it can be turned into one for another layout."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from vtp_plugin.checkpoint.format.checkpoint_files import (
    COMMON_FILE,
    check_archive,
    find_payload,
    load_object,
    problem_of_config,
    read_archive,
)
from vtp_plugin.checkpoint.format.contents import WEIGHT, Contents, kind_of, taking
from vtp_plugin.checkpoint.format.index import (
    DamagedError,
    Extent,
    Index,
    Manifest,
    StoredTensor,
    files_of,
    load_manifest,
    problems_of_pieces,
    problems_of_sizes,
    read_index,
    write_archive,
)
from vtp_plugin.checkpoint.format.resolver import (
    BY_BLOCK,
    BY_BUCKET,
    BY_BUCKET_OLDER,
    BY_RANK,
    FORM,
    IN_BUCKETS,
    IN_MODEL_SPACE,
    PLAIN,
    TYPE,
    stored_optimizers,
)
from vtp_plugin.checkpoint.format.safe_pickle import dump_again, load_safely
from vtp_plugin.checkpoint.format.site_part import read_part
from vtp_plugin.checkpoint.save.atomic_dir import arguments_of, problem_without_manifest
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import box_shape, format_box, overlaps, volume

_OF_A_GROUP: Final = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(\w+)(?:/shard_.*)?")
_RANDOM: Final = "rng_state/"
OF_RANKS: Final = (_RANDOM, "rerun_state_machine_state/")
"""What is stored by pipeline and tensor-parallel rank."""
_BECOMES: Final = {
    None: None,
    PLAIN: PLAIN,
    BY_BUCKET: IN_MODEL_SPACE,
    IN_MODEL_SPACE: IN_MODEL_SPACE,
    BY_BUCKET_OLDER: BY_BLOCK,
    BY_RANK: BY_BLOCK,
    BY_BLOCK: BY_BLOCK,
}
"""The form that any uniform layout loads, with the Megatron that wrote each form."""


def form_for_any(contents: Contents, wanted: str | None = None) -> str | None:
    """Return the format in which any uniform layout loads a checkpoint's optimizer.

    Args:
        contents: the checkpoint.
        wanted: the format to use, if it is not that of the Megatron that wrote the checkpoint.

    Raises:
        ConfigError: the checkpoint cannot be written so.
    """
    own = contents.form
    if own not in _BECOMES:
        known = ", ".join(form for form in _BECOMES if form)
        raise ConfigError(
            f"{contents.folder} holds the optimizer as {own}; this version knows {known}; take a newer vtp_plugin, or "
            "load only the weights with --no-load-optim"
        )
    form = _BECOMES[own]
    if wanted in (None, form):
        return form
    if form == BY_BLOCK:
        return wanted
    state = "has no optimizer" if own is None else f"holds the optimizer as {own}"
    raise ConfigError(f"{contents.folder} {state}; of that nothing is made {wanted}; leave --form out")


def is_kept(contents: Contents, key: str, form: str | None) -> bool:
    """Tell whether the data of a key is copied: all but what all ranks share, and an optimizer in another format.

    What unequal stages have stored by pipeline and tensor-parallel rank has no place elsewhere.

    Args:
        contents: the checkpoint as it is.
        key: key of a tensor or of an object.
        form: format that the optimizer gets.
    """
    if _OF_A_GROUP.match(key) or kind_of(key) != WEIGHT:
        return form == contents.form
    return not (key.startswith("common_state/") or (key.startswith(OF_RANKS) and _is_unequal(contents)))


def loses_random_states(contents: Contents) -> bool:
    """Tell whether a checkpoint has random states that find no place in another layout."""
    return _is_unequal(contents) and any(key.startswith(_RANDOM) for key in contents.index.objects)


def note_of_experts(contents: Contents) -> str | None:
    """Say which layouts can load the optimizer of a model with experts; None without experts or an optimizer.

    Megatron numbers optimizers where experts have one of their own, and loads neither form where they have the other.
    """
    optimizer = contents.common.get("optimizer")
    if contents.form is None or not contents.arguments.get("num_experts") or not isinstance(optimizer, Mapping):
        return None
    elsewhere = "load only the weights elsewhere, with --no-load-optim"
    if any(isinstance(key, int) for key in cast(Mapping[Any, Any], optimizer)):
        return (
            "experts have an optimizer of their own in it; only layouts load it in which they have one: with an "
            f"expert-parallel size above 1, or with another tensor-parallel size than other layers; {elsewhere}"
        )
    return (
        "experts have no optimizer of their own in it; only layouts load it in which they have none: with an "
        f"expert-parallel size of 1, and the tensor-parallel size of other layers; {elsewhere}"
    )


def _is_unequal(contents: Contents) -> bool:
    return len(set(contents.arguments.get("vtp_size_list") or ())) > 1


def rewritten_common(contents: Contents, form: str | None) -> tuple[str, bytes]:
    """Rewrite what all ranks share.

    Args:
        contents: the checkpoint as it is.
        form: format that the optimizer gets.

    Returns:
        The key under which it is stored, or the name of its file, and its bytes.

    Raises:
        ConfigError: stages have different optimizers.
    """
    objects = contents.index.objects
    key = next((key for key in objects if key.startswith("common_state/")), COMMON_FILE)
    entries = read_archive(contents.folder, objects.get(key, Extent(COMMON_FILE)))
    top = next(iter(entries)).partition("/")[0]
    with taking(contents.folder):
        read = load_safely(entries[f"{top}/data.pkl"])
        _rewrite(contents, read if key == COMMON_FILE else read[0], form)
        return key, write_archive({**entries, f"{top}/data.pkl": dump_again(read)})


def _rewrite(contents: Contents, common: dict[str, Any], form: str | None) -> None:
    arguments: dict[str, Any] = common["args"].state if "args" in common else {}
    if _is_unequal(contents):
        arguments["no_save_rng"] = True
        common.pop("rerun_state_machine", None)
    if form == contents.form:
        return
    if form == BY_BLOCK:
        # By this argument Megatron 0.12 knows the form.
        arguments["ckpt_fully_parallel_save"] = True
    else:
        content = common.setdefault("content_metadata", {})
        content[FORM] = form
        # Parameters are stored by name, so which of several optimizers has one need not stand before it.
        content["chained_optim_avoid_prefix"] = True
    for number, stored in _stored_by_groups(contents).items():
        state = common["optimizer"] if number is None else common["optimizer"].get(number)
        if state is None or TYPE not in state:
            raise ConfigError(
                f"{contents.folder} holds different optimizers on different stages; such a checkpoint cannot be "
                f"rewritten; load it with the plugin, and save it with {_SAVED_SO.get(form, form)}"
            )
        state.update(stored)
    for state in stored_optimizers(common):
        state.pop("param_state", None)
        state[TYPE] = form


_SAVED_SO: Final[Mapping[str | None, str]] = {
    IN_MODEL_SPACE: "--dist-ckpt-optim-fully-reshardable",
    BY_BLOCK: "stages of one size",
}


def _stored_by_groups(contents: Contents) -> dict[int | None, dict[str, Any]]:
    """Collect what the data-parallel groups have stored, for each optimizer in a chain, or for the only one."""
    objects = ((_OF_A_GROUP.fullmatch(key), extent) for key, extent in contents.index.objects.items())
    matched = [(match, extent) for match, extent in objects if match and match.group(3) in ("optimizer", "grad_scaler")]
    found: dict[int | None, dict[str, Any]] = {}
    # Megatron 0.12 takes groups of parameters in the order of the first stage.
    for match, extent in sorted(matched, key=lambda pair: int(pair[0].group(2))):
        number = None if match.group(1) is None else int(match.group(1))
        stored = found.setdefault(number, {"optimizer": {"param_groups": []}})
        (value,) = load_object(contents.folder, extent)
        if match.group(3) == "grad_scaler":
            stored["grad_scaler"] = value
        else:
            known = stored["optimizer"]["param_groups"]
            known += [group for group in value["param_groups"] if group not in known]
    for stored in found.values():
        # Of groups that are else alike the last one counts; it is to be one that knows the steps.
        stored["optimizer"]["param_groups"].sort(key=lambda group: "step" in group)
    return found


_COPY: Final = "copy it again, or take another checkpoint"


class Verification:
    """Verifies one checkpoint.

    Args:
        folder: folder of the checkpoint, in any format.

    Attributes:
        folder: folder of the checkpoint.
        manifest: manifest of the checkpoint; None if it has none.
        num_bytes: number of bytes that are read.

    Raises:
        ConfigError: it has no manifest, and its index cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest, self._damage = folder, None, ""
        try:
            self.manifest = load_manifest(folder)
        except ConfigError as error:
            self._damage = str(error)
        self._is_old = any(folder.glob("mp_rank_*"))
        self._index: Index | None = None
        if self._damage:
            self.num_bytes = 0
        elif self.manifest is not None:
            self.num_bytes = self.manifest.num_bytes
        elif self._is_old:
            self.num_bytes = sum((folder / name).stat().st_size for name in files_of(folder))
        else:
            self._index = read_index(folder)
            self.num_bytes = self._index.num_bytes

    def problems(self, on_read: Callable[[int], None]) -> Iterator[str]:
        """Say what is broken in the checkpoint.

        Args:
            on_read: called with a number of bytes, whenever so many more have been read.

        Yields:
            Lines ``value; rule; way out``.
        """
        if self._damage:
            yield self._damage
        elif self.manifest is not None:
            yield from self._compare(self.manifest, on_read)
        else:
            found = problem_without_manifest(self.folder, arguments_of(self.folder))
            yield from () if found is None else (f"{found}; it has the hashes of all files; {_COPY}",)
            yield from self._read(on_read)

    def _compare(self, manifest: Manifest, on_read: Callable[[int], None]) -> Iterator[str]:
        """Compare all files with their hashes; then look whether what is there fits together."""
        texts = (
            *problems_of_sizes(self.folder, manifest),
            *problems_of_pieces(self.folder, manifest, on_read),
        )
        yield from (f"{text}; it must be as it was written; {_COPY}" for text in texts)
        if not manifest.can_check:
            yield from self._read(on_read)
        elif not texts and not self._is_old:
            yield from check_fit(Contents(self.folder))

    def _read(self, on_read: Callable[[int], None]) -> Iterator[str]:
        if not self._is_old:
            yield from check_checkpoint(Contents(self.folder, self._index), on_read)
            return
        for name in files_of(self.folder):
            if name.endswith(".pt") and (problem := check_archive(self.folder, Extent(name))) is not None:
                yield f"{self.folder / name} {problem}; a rank reads it; {_COPY}"
            on_read((self.folder / name).stat().st_size)


def check_checkpoint(contents: Contents, on_read: Callable[[int], None]) -> Iterator[str]:
    """Say what is broken in a checkpoint without a manifest. Everything that its index names is read.

    Args:
        contents: the checkpoint.
        on_read: called with a number of bytes, whenever so many more have been read.

    Yields:
        Lines ``value; rule; way out``.
    """
    yield from check_fit(contents)
    index = contents.index
    sizes = {file: _size(contents.folder / file) for file in sorted({extent.file for _, extent in index.extents()})}
    yield from _check_contents(index, sizes, on_read)
    common = contents.folder / COMMON_FILE
    if common.exists() and (found := check_archive(contents.folder, Extent(COMMON_FILE))):
        yield f"{common} {found}; it holds what all ranks share; {_COPY}"


def check_fit(contents: Contents) -> Iterator[str]:
    """Say what of a checkpoint is missing or inconsistent, without reading the data that its index names.

    Yields:
        Lines ``value; rule; way out``.
    """
    index = contents.index
    if (problem := problem_of_config(contents.folder)) is not None:
        yield f"{problem}; it says in which format the rest is; {_COPY}"
    sizes = {file: _size(contents.folder / file) for file in sorted({extent.file for _, extent in index.extents()})}
    yield from _check_lengths(index, sizes)
    is_part = read_part(contents.folder) is not None
    for key, tensor in index.tensors.items():
        problems = problems_of_cover(tensor, is_part=is_part)
        yield from (f"{contents.folder}: {key} {problem}; {_COPY}" for problem in problems)
    if contents.form in IN_BUCKETS and contents.has_map:
        yield from _check_map(contents)


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _check_lengths(index: Index, sizes: dict[str, int | None]) -> Iterator[str]:
    """Say which files are missing or too short, one line for each."""
    lacks: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
    for key, extent in index.extents():
        end = extent.offset + (extent.length or 0)
        if end > (sizes[extent.file] or 0):
            lacks[extent.file].append((end, key))
    for name, found in sorted(lacks.items()):
        end, key = max(found)
        problem = "is missing" if sizes[name] is None else f"is cut off, with {sizes[name]} of {end} bytes"
        rest = f", and {len(found) - 1} more parts," if len(found) > 1 else ""
        yield f"{index.folder / name} {problem}; a part of {key}{rest} must be there; {_COPY}"


def problems_of_cover(tensor: StoredTensor, *, is_part: bool = False) -> Iterator[str]:
    """Say whether parts of a tensor lie outside it, overlap, or leave elements out.

    Args:
        tensor: the tensor.
        is_part: whether elements may be missing, which another site keeps.

    Yields:
        Texts that follow the tensor's name.
    """
    boxes = [box for box, _ in tensor.extents]
    for box in boxes:
        if any(stop > length for (_, stop), length in zip(box, tensor.shape, strict=True)):
            yield f"{tensor.shape} has a part at {format_box(box)}; none may lie outside"
            return
    pair = next(overlaps(boxes), None) if tensor.shape else None
    if pair is not None:
        yield f"{tensor.shape} is stored twice at {format_box(boxes[pair[1]])}; each element must be stored once"
    elif not is_part and (count := sum(map(volume, boxes))) != math.prod(tensor.shape):
        yield f"{tensor.shape} is stored in {count} of {math.prod(tensor.shape)} elements; none may be missing"


def _check_map(contents: Contents) -> Iterator[str]:
    try:
        contents.stored()
    except ConfigError as error:
        yield str(error)
        return
    cuts: dict[str, set[tuple[object, ...]]] = {}
    for bucket, tensors in contents.tensors_of_buckets.items():
        cuts[bucket] = {tuple(sorted(box for box, _ in tensor.extents)) for tensor in tensors.values()}
        if len(cuts[bucket]) > 1:
            yield f"{contents.folder}: states of {bucket} are cut in different places; all must be cut alike; {_COPY}"


def _check_contents(index: Index, sizes: dict[str, int | None], on_read: Callable[[int], None]) -> Iterator[str]:
    """Read what lies in files; what lies beyond the end of one was reported before."""
    parts = [
        (key, extent, box, tensor.dtype) for key, tensor in index.tensors.items() for box, extent in tensor.extents
    ]
    parts += [(key, extent, None, "") for key, extent in index.objects.items()]
    for key, extent, box, dtype in sorted(parts, key=lambda part: (part[1].file, part[1].offset)):
        length = extent.length or 0
        if extent.offset + length > (sizes[extent.file] or 0):
            continue
        problem = check_archive(index.folder, extent)
        if problem is None and box is not None:
            problem = _problem_of_tensor(index.folder, extent, box_shape(box), dtype)
        if problem is not None:
            yield f"{index.folder / extent.file} {problem}; a part of {key} lies there; {_COPY}"
        on_read(length)


def _problem_of_tensor(folder: Path, extent: Extent, shape: tuple[int, ...], dtype: str) -> str | None:
    try:
        found = find_payload(folder, extent)
    except DamagedError as error:
        return str(error)
    if (found.shape, found.dtype) == (shape, dtype):
        return None
    return f"holds {found.dtype} {found.shape} at byte {extent.offset}, and {dtype} {shape} is expected"
