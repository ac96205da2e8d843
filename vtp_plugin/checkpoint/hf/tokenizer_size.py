"""The number of words that a tokenizer knows: one more than its highest number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vtp_plugin.util.untrusted_files import read_json

_MAX_NUMBER: Final = 1 << 40
_MAX_BYTES: Final = 256 << 20


def known_words(folder: Path) -> tuple[int, str] | None:
    """Return how many words the tokenizer of a folder knows, those that were added included, and the file that says so.

    Files that are missing or damaged say nothing.

    Args:
        folder: folder with the files of the tokenizer.
    """
    found: list[tuple[int, str]] = []
    for name, numbers in _READERS.items():
        try:
            read = [each for each in numbers(read_json(folder / name, _MAX_BYTES)) if type(each) is int]
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
        found += [(1 + each, name) for each in read if 0 <= each < _MAX_NUMBER]
    return max(found, default=None)


def _of_tokenizer(read: Any) -> Iterator[Any]:
    words = read["model"].get("vocab", {})
    yield from words.values() if isinstance(words, dict) else [len(words) - 1]  # of unigrams, a list
    yield from (each["id"] for each in read.get("added_tokens") or ())


def _of_config(read: Any) -> Iterator[Any]:
    yield from map(int, read.get("added_tokens_decoder", {}))


_READERS: Final = {
    "tokenizer.json": _of_tokenizer,
    "added_tokens.json": lambda read: read.values(),
    "vocab.json": lambda read: read.values(),
    "tokenizer_config.json": _of_config,
}
