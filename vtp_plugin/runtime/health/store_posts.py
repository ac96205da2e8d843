"""Posts of other ranks in the store, read as values of a declared shape.

Every process that reaches the store can post there, under any key and of any size. So every post is read by a function
of this module: as a number, a word or JSON of a declared shape, in a bounded size, without characters that a terminal
obeys. Anything else is an error of one line that names the key.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, TypeVar, cast

import torch.distributed as dist

from vtp_plugin.errors import PeerError
from vtp_plugin.util.printable import one_line
from vtp_plugin.util.typed_json import ShapeError, read_typed

_MOST_SHOWN = 80

_Kind = TypeVar("_Kind")


class PostError(PeerError):
    """A post is not what ranks of this version write."""

    def __init__(self, topic: str, key: str, problem: str) -> None:
        text = (
            f"the post {topic}/{key} in the store {problem}; only a rank of another version, or a stranger, writes "
            "that; install one version everywhere, and let nobody else reach MASTER_PORT (docs/guides/edge-cloud.md)"
        )
        super().__init__(text, shared=text)


def write_post(value: Any) -> str:
    """Write JSON that the readers below take: an option may be infinite, a number in JSON may not.

    >>> write_post({"share": float("inf"), "sizes": (1, 2)})
    '{"share": "inf", "sizes": [1, 2]}'
    """
    return json.dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in cast("list[Any]", value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_post(kind: type[_Kind], data: str | bytes, topic: str, key: str) -> _Kind:
    """Parse a post that was already read from the store; arguments and error are those of :func:`read_post`."""
    try:
        return read_typed(kind, data)
    except ShapeError as error:
        raise PostError(topic, key, str(error)) from None


def read_post(kind: type[_Kind], part: dist.Store, key: str, topic: str) -> _Kind:
    """Read JSON of a declared shape, see :func:`~vtp_plugin.util.typed_json.read_typed`.

    Args:
        kind: declared shape.
        part: part of the store that belongs to the topic.
        key: key of the post; the call waits until it is there.
        topic: key of the topic, for the error.

    Raises:
        PostError: the post has another shape.
    """
    return parse_post(kind, part.get(key), topic, key)


def read_number(part: dist.Store, key: str, topic: str, least: int, most: int) -> int:
    """Read a whole number from `least` to `most`; arguments and error are those of :func:`read_post`."""
    number = read_post(int, part, key, topic)
    if not least <= number <= most:
        raise PostError(topic, key, f"is {number}, not between {least} and {most}")
    return number


def read_text(part: dist.Store, key: str) -> str:
    """Read any post as one plain line, cut to a bounded length."""
    return shown(part.get(key))


def read_word(part: dist.Store, key: str, topic: str, pattern: str) -> str:
    """Read a word that a pattern matches as a whole; arguments and error are those of :func:`read_post`."""
    return require_word(part.get(key), topic, key, pattern)


def require_word(data: bytes, topic: str, key: str, pattern: str) -> str:
    """Parse such a word from a post that was already read."""
    if not re.fullmatch(pattern.encode(), data):
        raise PostError(topic, key, f"is {one_line(shown(data), _MOST_SHOWN)!r}, which is no such name")
    return data.decode()


def shown(data: bytes) -> str:
    """Return a post as one plain line, cut to a bounded length."""
    # UTF-8 has at most four bytes for a character.
    return one_line(data[:8004].decode(errors="backslashreplace"))
