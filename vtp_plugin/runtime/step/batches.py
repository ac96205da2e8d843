"""Iterators that stand in for those that a script's forward step reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Reader:
    """Iterator that reads by a function."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        return self._read()


def checked(given: Any, check: Callable[[Any], None]) -> Any:
    """Let every batch be checked when it is read.

    Args:
        given: Megatron's data iterator, None, or a list of these, one for each chunk.
        check: raises an error if a batch must not be read.

    >>> [next(batches) for batches in checked([iter("a"), iter("b")], print)]
    a
    b
    ['a', 'b']
    >>> checked(None, print)
    """
    if isinstance(given, list):
        return [checked(each, check) for each in given]
    return None if given is None else Reader(lambda: _read(given, check))


def _read(batches: Iterator[Any], check: Callable[[Any], None]) -> Any:
    batch = next(batches)
    check(batch)
    return batch
