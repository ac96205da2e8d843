"""The files beside a published model's weights: which may be read, and which are copied as they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from vtp_plugin.errors import ConfigError
from vtp_plugin.util.untrusted_files import inside, open_file

CONFIG: Final = "config.json"
"""The name of the file that says what a model is."""
_NAMES: Final = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    CONFIG,
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "tokenizer_config.json",
    "vocab.json",
)
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def file_of(folder: Path, name: str) -> Path:
    """Return the path of a file of a model, which lies in its folder.

    A link is followed to a file of the folder. In the cache of Hugging Face, where a model's folder is
    ``REPOSITORY/snapshots/REVISION`` and full of links, it is followed to the files of ``REPOSITORY/blobs``, too.

    Args:
        folder: folder of the model.
        name: name of the file, perhaps from another file of the model.

    Raises:
        ConfigError: it is no such name, or a link to elsewhere.
    """
    path, parts = folder / name, Path(name).parts
    revision, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_cache = revision.parent.name == _SNAPSHOTS and target.parent == revision.parent.parent / _BLOBS
    if is_cache and ".." not in parts and not Path(name).is_absolute():
        return path
    try:
        return inside(folder, name)
    except ValueError as error:
        raise ConfigError(
            f"{folder}: {error}; a model's files lie in its folder, or in {_BLOBS} of its repository in Hugging Face's "
            "cache; put the file itself there, or remove it"
        ) from None


def carried_files(folder: Path) -> tuple[Path, ...]:
    """Return the config, the generation config and the files of the tokenizer that are there.

    Raises:
        ConfigError: one is a link to elsewhere.
    """
    return tuple(file_of(folder, name) for name in _NAMES if os.path.lexists(folder / name))


def copy_carried(folder: Path, target: Path) -> list[Path]:
    """Copy the config, the generation config and the files of the tokenizer.

    Args:
        folder: folder of the model.
        target: the folder to copy to; it exists.

    Returns:
        The copies.

    Raises:
        ConfigError: one is a link to elsewhere, or no file.
    """
    copies = [target / file.name for file in carried_files(folder)]
    for copy in copies:
        try:
            source = open_file(folder / copy.name)
        except OSError as error:
            raise ConfigError(
                f"{folder / copy.name} cannot be read: {error.strerror}; it is carried along; put a file "
                "there, or remove it"
            ) from None
        with source, copy.open("wb") as written:
            shutil.copyfileobj(source, written)
    return copies
