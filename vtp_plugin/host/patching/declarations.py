"""Records as they are declared beside the code that uses them: data that can be listed without a session.

:func:`replaces` and :func:`subclasses` stand above a function, a :class:`Written` is a name of the module, or in a
dictionary that is.
:func:`declared` lists what a module declares; :meth:`Declared.bound` makes of it what the engine applies.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from vtp_plugin.host.patching.record import PatchRecord, Record, WriteRecord, wrap_with
from vtp_plugin.util.undo import namespace

_MARK = "__vtp_declared__"
_ORIGINAL = "original"

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared(Record):
    """One change of another package, as it is declared.

    Attributes:
        when: the moment at which it applies; what moments there are is up to those who choose.
    """

    when: str

    def bound(self, given: Mapping[str, Any]) -> Record:
        """Return the record that can be applied.

        Args:
            given: what replacements ask for, by name.
        """
        raise NotImplementedError

    def _common(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(Record)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacement(Declared):
    """A :class:`~vtp_plugin.host.patching.record.PatchRecord` as it is declared.

    Attributes:
        needs: names of what its function asks for: of its parameters before ``original``.
        make: gets what the function asks for, and returns the record's ``build``.
    """

    needs: tuple[str, ...]
    make: Callable[..., Callable[[Any], Any]]

    def bound(self, given: Mapping[str, Any]) -> PatchRecord:
        """As of every declaration; the function is bound to what it asks for."""
        return PatchRecord(build=self.make(*(given[name] for name in self.needs)), **self._common())


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Declared):
    """A :class:`~vtp_plugin.host.patching.record.WriteRecord` as it is declared; :class:`Writes` writes it."""

    def bound(self, given: Mapping[str, Any]) -> WriteRecord:
        """As of every declaration; `given` has the ``writes`` by which it is written."""
        return given["writes"].add(WriteRecord(**self._common()))


class Writes:
    """The names that may be written, by their declarations: ``writes[_LIMIT].put(5)``."""

    def __init__(self) -> None:
        self._records: dict[str, WriteRecord] = {}

    def __getitem__(self, declared: Written) -> WriteRecord:
        return self._records[declared.id]

    def add(self, record: WriteRecord) -> WriteRecord:
        """Let a name be written from now on, and return its record."""
        return self._records.setdefault(record.id, record)

    def undo(self, declared: Iterable[Written]) -> None:
        """Put back what was there before; of a name that this host does not need nothing was written."""
        for name in declared:
            if name.id in self._records:
                self._records[name.id].undo()


def replaces(target: str = "", **record: Any) -> Callable[[Function], Function]:
    """Declare that a function runs in place of one of the host's.

    Args:
        target: target of the record.
        record: its other attributes, as of :class:`Replacement`.

    The function asks for what it needs by the names of its parameters before ``original``. Several declarations may
    stand above one function.

    >>> @replaces("host.state:setup", id="X1", when="always", why="...", remove_when="never")
    ... def shout(end, original, text):
    ...     return original(text) + end
    >>> (record,) = declared_by(shout)
    >>> record.id, record.needs, record.bound({"end": "!"}).build(str.upper)("hi")
    ('X1', ('end',), 'HI!')
    """
    return _declare(target, record, partial(partial, wrap_with))


def subclasses(target: str = "", **record: Any) -> Callable[[Function], Function]:
    """Declare that a function makes a subclass that stands in place of a class of the host's.

    Args:
        target: target of the record.
        record: its other attributes, as of :class:`Replacement`.

    The function gets the class as ``original``, and what it needs before it.
    """
    return _declare(target, record, partial(partial, partial))


def _declare(
    target: str, record: Mapping[str, Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[Function], Function]:
    def declare(function: Function) -> Function:
        names = list(inspect.signature(function).parameters)
        needs = tuple(names[: names.index(_ORIGINAL)])
        found = Replacement(target=target, needs=needs, make=make(function), **record)
        setattr(function, _MARK, (found, *declared_by(function)))
        return function

    return declare


def declared_by(function: Callable[..., Any]) -> tuple[Replacement, ...]:
    """Return what a function is declared to replace, from top to bottom."""
    return getattr(function, _MARK, ())


def declared(module: ModuleType) -> tuple[Declared, ...]:
    """List what a module declares, in the order of the file: its replacements, then what they write."""

    def found() -> Iterator[Declared]:
        for value in namespace(module).values():
            if isinstance(value, Written):
                yield value
            elif isinstance(value, dict):
                yield from (item for item in value.values() if isinstance(item, Written))
            elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
                yield from declared_by(value)

    return tuple(sorted(found(), key=lambda record: isinstance(record, Written)))
