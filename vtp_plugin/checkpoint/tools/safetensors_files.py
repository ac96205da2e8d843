"""Reads safetensors files box by box, and writes them as a stream: no whole tensor is in memory."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from vtp_plugin.checkpoint.format.archive import itemsize
from vtp_plugin.checkpoint.hf.side_files import file_of
from vtp_plugin.checkpoint.hf.tensor_rows import TensorShare
from vtp_plugin.errors import ConfigError
from vtp_plugin.util.index_boxes import Box
from vtp_plugin.util.untrusted_files import open_file, read_json

INDEX: Final = "model.safetensors.index.json"
"""The name of the file that says which tensor lies in which file."""
SINGLE: Final = "model.safetensors"
"""The name of the only file of a small model."""
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_ENDINGS: Final = (".safetensors", ".safetensors.index.json")
# Mistral puts its own format beside that of transformers, which passes over it as well.
_OF_MISTRAL: Final = "consolidated"
_WAY_OUT: Final = "download it again"
_TWO_SETS: Final = "move what does not belong to the model out of the folder"
# As transformers cuts them; a file is read as a whole when it is copied.
MAX_FILE_BYTES: Final = 5_000_000_000


class Shards:
    """The tensors of a published model.

    Args:
        folder: folder of the model.

    Attributes:
        folder: folder of the model.

    Raises:
        ConfigError: there are none, or two sets of them; a file is missing or damaged, or the package safetensors is.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = self._listed()
        files = {name: self._open(name) for name in (dict.fromkeys(listed.values()) if listed else (SINGLE,))}
        places: dict[str, str] = {}
        for file, opened in files.items():
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if name in places:
                    raise ConfigError(
                        f"{folder}: {places[name]} and {file} hold {name}; a model has it once; {_TWO_SETS}"
                    )
                places[name] = file
        for name, file in listed.items():
            if places.get(name) != file:
                raise ConfigError(
                    f"{folder / INDEX} names {name}, and {file} does not hold it; both must say the same; {_WAY_OUT}"
                )
        for name in places.keys() - listed.keys() if listed else ():
            raise ConfigError(
                f"{folder}: {places[name]} holds {name}, and {INDEX} does not name it there; "
                f"both must say the same; {_WAY_OUT}"
            )
        self._tensors = {name: (files[file], name) for name, file in places.items()}

    def __repr__(self) -> str:
        return f"<{len(self._tensors)} tensors of {self.folder}>"

    def _listed(self) -> dict[str, str]:
        """Return the file of every tensor, as the index says it; nothing where there is a single file.

        Raises:
            ConfigError: no file, or more than one set of them.
        """
        found = sorted(path.name for path in self.folder.iterdir() if path.name.endswith(_ENDINGS))
        found = [name for name in found if not name.startswith(_OF_MISTRAL)]
        listed = self._read_index() if INDEX in found else {}
        if not listed and SINGLE not in found:
            others = f", but {found[0]}" if found else ""
            raise ConfigError(
                f"{self.folder} holds neither {SINGLE} nor {INDEX}{others}; tensors are read from these; download "
                "them, or save the model with transformers, which writes them"
            )
        first = INDEX if listed else SINGLE
        others = [name for name in found if name not in {first, *listed.values()}]
        if others:
            raise ConfigError(
                f"{self.folder} holds {first} and {others[0]}, which may be another set of weights; one of them is "
                f"imported, and transformers may take the other; {_TWO_SETS}"
            )
        return listed

    def _read_index(self) -> dict[str, str]:
        """Read which file holds which tensor."""
        index = file_of(self.folder, INDEX)
        try:
            listed = read_json(index)["weight_map"]
            if not listed or not all(isinstance(file, str) for file in listed.values()):
                raise ValueError("its weight_map names no files")
        except OSError as error:
            raise ConfigError(
                f"{index} cannot be read: {error.strerror}; it says where every tensor lies; {_WAY_OUT}"
            ) from None
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigError(f"{index} is damaged ({error}); it says where every tensor lies; {_WAY_OUT}") from None
        return listed

    def _open(self, name: str) -> Any:
        file = file_of(self.folder, name)
        try:
            open_file(file).close()
        except FileNotFoundError:
            raise ConfigError(f"{file} is missing; {INDEX} names it; {_WAY_OUT}") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}; it holds weights; {_WAY_OUT}") from None
        try:
            safetensors = importlib.import_module("safetensors")
        except ImportError:
            raise ConfigError(
                f"{file} cannot be read; that needs the package safetensors; pip install 'vtp-plugin[hf]'"
            ) from None
        try:
            return safetensors.safe_open(file, "pt")
        except (safetensors.SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged ({error}); it holds weights; {_WAY_OUT}") from None

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors as the model's class calls them.

        Args:
            names: names in the files, by the new names.
        """
        self._tensors = {name: self._tensors[stored] for name, stored in names.items()}

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return [*self._tensors]

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor has in its file."""
        return self._tensors[name][1]

    def _slice(self, name: str) -> Any:
        file, stored = self._tensors[name]
        return file.get_slice(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype_of(self, name: str) -> str:
        """Return the type of a tensor's elements, as torch calls it.

        Raises:
            ConfigError: weights of such a type are quantised.
        """
        found = self._slice(name).get_dtype()
        if found not in _DTYPES:
            raise ConfigError(
                f"{self.folder}: {name} has the type {found}; weights are {', '.join(_DTYPES)}, and quantised ones are "
                "not read; take the model that was quantised"
            )
        return _DTYPES[found]

    def dtype(self, part: TensorShare) -> str:
        """Return the type of the elements of a share."""
        return self.dtype_of(part.name)

    def read(self, part: TensorShare, box: Box) -> torch.Tensor:
        """Read a box of a Megatron tensor out of a share.

        Returns:
            The bytes of the elements, in the order of the Megatron tensor.
        """
        rows, *rest = (slice(start, stop) for start, stop in part.hf_box(box))
        found: torch.Tensor = self._slice(part.name)[(rows, *rest) if rest else rows]
        return found.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor that is to be written.

    Attributes:
        name: name of the tensor.
        dtype: name of its elements' type, as torch calls it.
        shape: shape of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * itemsize(self.dtype)


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


def index_text(files: Mapping[str, Sequence[NewTensor]]) -> str:
    """Write the index of several files."""
    total = sum(tensor.num_bytes for held in files.values() for tensor in held)
    places = {tensor.name: file for file, held in files.items() for tensor in held}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


def write_header(file: BinaryIO, tensors: Iterable[NewTensor]) -> None:
    """Write what stands before the elements: the length of a JSON object, and the object.

    Follows the format as https://github.com/huggingface/safetensors describes it; its own writer holds all tensors of a
    file in memory.
    """
    codes = {name: code for code, name in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": codes[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def is_writable(dtype: str) -> bool:
    """Tell whether a published model has weights of a type."""
    return dtype in _DTYPES.values()


def known_types() -> Iterator[str]:
    """Yield the types that weights may have."""
    yield from _DTYPES.values()
