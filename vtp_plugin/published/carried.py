"""Files of a published model that are carried along as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_NAMES: Final = (
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
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


def carried_files(folder: Path) -> tuple[Path, ...]:
    """Return the config, the generation config and the files of the tokenizer that are there."""
    return tuple(folder / name for name in _NAMES if (folder / name).is_file())
