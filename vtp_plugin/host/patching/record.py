"""Patch records: what they replace, how they are declared, the slots that they find.

Records as they are declared beside the code that uses them: data that can be listed without a session.

:func:`replaces` and :func:`subclasses` stand above a function, a :class:`Written` is a name of the module, or in a
dictionary that is.
:func:`declared` lists what a module declares; :meth:`Declared.bound` makes of it what the engine applies.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, Final, TypeVar

from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions import SUPPORTED, check_range, is_in
from vtp_plugin.util.undo import ABSENT, Item, Name, Slot, UndoStack, namespace


@dataclass(frozen=True, slots=True)
class Default:
    """The default of an argument that may be given by position; the others are entries of ``__kwdefaults__``.

    >>> def call(f=len): ...
    >>> Default(call, 0).put(max)
    >>> call.__defaults__, Default(call, 1).get() is ABSENT
    ((<built-in function max>,), True)
    """

    function: Any
    index: int

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.function), self.index

    def get(self) -> object:
        """As of every place."""
        return _item(self.function.__defaults__ or (), self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        self.function.__defaults__ = _with_item(self.function.__defaults__ or (), self.index, value)


@dataclass(frozen=True, slots=True)
class PartialPart:
    """The function (index 0) or a positional argument (from 1 on) of a :func:`functools.partial`.

    >>> call = functools.partial(len, len, key=len)
    >>> PartialPart(call, 0).put(max)
    >>> PartialPart(call, 1).put(min)
    >>> call
    functools.partial(<built-in function max>, <built-in function min>, key=<built-in function len>)
    """

    partial: functools.partial[Any]
    index: int

    @property
    def key(self) -> tuple[int, object]:
        """As of every place."""
        return id(self.partial), self.index

    def get(self) -> object:
        """As of every place."""
        return _item((self.partial.func, *self.partial.args), self.index)

    def put(self, value: Any) -> None:
        """As of every place."""
        function, *args = _with_item((self.partial.func, *self.partial.args), self.index, value)
        # Its fields are read-only, but it can be unpickled in place.
        state = function, tuple(args), self.partial.keywords, vars(self.partial)
        self.partial.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue]


def _item(items: tuple[Any, ...], index: int) -> object:
    return items[index] if index < len(items) else ABSENT


def _with_item(items: tuple[Any, ...], index: int, value: Any) -> tuple[Any, ...]:
    return (*items[:index], value, *items[index + 1 :])


MARKER: Final = "__vtp_record__"
"""Attribute of every replacement (of a property: of its accessors); holds the id of its record."""

# These packages do not patch the host: the host decorates its functions with them.
_DECORATOR_LIBRARIES: Final = sys.stdlib_module_names | {"torch", "typing_extensions"}


def functions(value: Any) -> list[Any]:
    """Return what a raw attribute runs: the function inside a descriptor, the accessors of a property, or itself."""
    if isinstance(value, property):
        return [accessor for accessor in (value.fget, value.fset, value.fdel) if accessor is not None]
    return [value.__func__] if isinstance(value, staticmethod | classmethod) else [value]


def attributes(obj: Any) -> Mapping[str, Any]:
    """Return the attributes of an object itself; of a class without inherited ones, of a proxy those behind it."""
    return getattr(obj, "__dict__", {})


def chain(value: Any) -> Iterator[Any]:
    """Yield the functions of a raw attribute and everything below them along `__wrapped__`, outermost first."""
    for link in functions(value):
        seen: set[int] = set()
        while link is not None and id(link) not in seen:
            seen.add(id(link))
            yield link
            link = attributes(link).get("__wrapped__")


def foreign_wrapper(target: Target, is_own: Callable[[str], bool]) -> str:
    """Name the module of another package that wrapped the target, or return an empty string.

    functools.wraps copies `__module__`, so the module whose globals the code runs with counts as well.

    Args:
        target: The patched attribute.
        is_own: Tells whether a module is part of the package that is patched.
    """
    if isinstance(target.defined_in, type) and not is_own(target.defined_in.__module__):
        return ""  # inherited from another package as it is
    for link in chain(target.value):
        for home in (getattr(link, "__module__", None), _code_home(link)):
            if isinstance(home, str) and not is_own(home) and home.partition(".")[0] not in _DECORATOR_LIBRARIES:
                return home
    return ""


def _code_home(obj: Any) -> str | None:
    """Return the module in which a Python function was written, whatever its `__module__` says."""
    return obj.__globals__.get("__name__") if isinstance(obj, FunctionType) else None


def wrong_kind(old: object, new: object) -> str | None:
    """Say what is wrong with a replacement, or return None when it can stand in for the original."""
    if new is old:
        return "the original itself"
    if isinstance(old, property):
        changed = isinstance(new, property) and any(all(n is not o for o in functions(old)) for n in functions(new))
        return None if changed else "no property with a new accessor"
    if isinstance(old, type):
        return None if isinstance(new, type) else "no class in place of a class"
    if not callable(new) or isinstance(new, staticmethod | classmethod):
        return f"a {type(new).__name__} instead of a plain function"
    return None


def describe(obj: Any) -> str:
    """Name an object and the module in which it was written, for messages."""
    function = next(iter(functions(obj)), obj)
    home = _code_home(function) or getattr(function, "__module__", None) or type(function).__module__
    return f"{home}.{getattr(function, '__qualname__', type(function).__qualname__)}"


_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
AnyRecord = TypeVar("AnyRecord", bound="Record")
_TARGET = re.compile(rf"{_DOTTED}:{_DOTTED}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One change of another package; it does nothing before :func:`vtp_plugin.host.patching.apply_records` gets it.

    Attributes:
        id: Short name used in messages and tables, such as ``"parallel-state"``.
        target: ``"package.module:name"`` or ``"package.module:Class.method"``.
        targets: Where it lies in which versions, by ranges as of `versions`, from which :meth:`at` chooses the target.
        unneeded: Versions that need no such record, by ranges, and why.
        why: Why this seam and not another one.
        versions: Versions of the host, such as ``">=0.19,<0.20"``.
        remove_when: What makes the record superfluous.
        aliases: Names ``"package.module:name"`` that hold the target through a from-import. The engine finds aliases
            by identity and does not need this list: the status names those that a changed host no longer has.

    Raises:
        PatchError: The target, an alias or the version range is malformed.
    """

    id: str
    target: str = ""
    targets: Mapping[str, str] = field(default_factory=dict[str, str])
    unneeded: Mapping[str, str] = field(default_factory=dict[str, str])
    why: str
    remove_when: str
    versions: str = SUPPORTED
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        targets = self.targets.values() or (self.target,)
        for place in (*targets, *self.aliases):
            if not _TARGET.fullmatch(place):
                raise PatchError(f"patch {self.id}: {place!r} is not of the form 'package.module:Name'; fix the record")
        for versions in (self.versions, *self.targets, *self.unneeded):
            try:
                check_range(versions)
            except ValueError as error:
                raise PatchError(f"patch {self.id}: {error}") from error

    @property
    def module(self) -> str:
        """Full name of the module that the target lives in."""
        return self.target.partition(":")[0]

    def fits(self, host_version: str) -> bool:
        """Tell whether the record is made for this version; pre-releases of versions in the range count.

        Raises:
            ValueError: `host_version` is not a PEP 440 version.
        """
        return is_in(host_version, self.versions)

    def at(self: AnyRecord, host_version: str) -> AnyRecord | None:
        """Return the record with its target in this version; None where none is needed.

        Raises:
            PatchError: `targets` and `unneeded` say nothing of this version, or several things.
        """
        said = [*self.targets.items(), *((versions, "") for versions in self.unneeded)]
        found = [target for versions, target in said if is_in(host_version, versions)]
        if not found and not self.targets:
            return self
        if len(found) != 1:
            what = "several things" if found else "nothing"
            raise PatchError(f"patch {self.id}: its ranges say {what} of version {host_version}; fix the record")
        return replace(self, target=found[0]) if found[0] else None


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRecord(Record):
    """One replacement of one object of the host package, in every place that holds it.

    Attributes:
        target: A function, class, method or property; the module is the one that defines it. Constants are refused,
            because they cannot be told apart by identity.
        build: Gets the original object and returns its replacement, a new object: for a function use
            :func:`wrap_with`. Of a staticmethod or classmethod it gets the plain function and returns a plain function:
            the engine keeps the kind. It may be called for an apply that fails later, so it has no other effect.

    >>> record = PatchRecord(
    ...     id="X1", target="host.state:setup", build=lambda f: f, why="...", versions=">=1,<2", remove_when="never"
    ... )
    >>> record.module, record.fits("1.4.2"), record.fits("2.0")
    ('host.state', True, False)
    """

    build: Callable[[Any], Any]


def wrap_with(replacement: Callable[..., Any], *state: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the `build` of a record that lets a function run in place of the original.

    Args:
        replacement: gets `state`, then the original, then the arguments of the call.
        state: what else it needs, such as the session.

    >>> build = wrap_with(lambda end, original, text: original(text) + end, "!")
    >>> shout = build(str.upper)
    >>> shout("hi"), shout.__name__
    ('HI!', 'upper')
    """

    def build(original: Callable[..., Any]) -> Callable[..., Any]:
        # A closure holds the original. The search for aliases would find it in a partial object, and replace it there.
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(*state, original, *args, **kwargs)

        return call

    return build


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteRecord(Record):
    """One name that patches assign to during a run; only this name, not what else holds the same object.

    Attributes:
        target: A variable, also a constant; or a dictionary or class, of which single entries or attributes are
            written. It must exist.

    >>> import string
    >>> record = WriteRecord(id="X2", target="string:digits", why="...", versions=">=1,<2", remove_when="never")
    >>> with record.during("01"):
    ...     string.digits, record.is_written
    ('01', True)
    >>> string.digits, record.is_written
    ('0123456789', False)
    """

    _undo: UndoStack = field(default_factory=UndoStack, init=False, repr=False, compare=False)

    @property
    def is_written(self) -> bool:
        """Whether something was written and not undone."""
        return len(self._undo) > 0

    def put(self, value: object, *, key: object = ABSENT) -> None:
        """Assign to the name or, with a key, to an entry of the dictionary or an attribute of the class it holds."""
        self._undo.put(self._place(key), value)

    def during(self, value: object, *, key: object = ABSENT) -> AbstractContextManager[None]:
        """Assign as :meth:`put` does, inside a ``with`` block."""
        return self._undo.during(self._place(key), value)

    def undo(self) -> None:
        """Put back what was there before; what somebody else has assigned meanwhile stays."""
        self._undo.undo()

    def _place(self, key: object) -> Slot:
        target = resolve_target(self.target)
        if key is ABSENT:
            return Name(target.owner, target.name)
        return Name(target.value, str(key)) if isinstance(target.value, type) else Item(target.value, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An attribute as it lies in a namespace: descriptors are not bound.

    Attributes:
        owner: Module or class on which a replacement is set; a class that only inherits the attribute is possible.
        name: Name of the attribute.
        value: The raw object, possibly a staticmethod, classmethod or property object.
        defined_in: Module or class whose namespace holds `value`: `owner` or, for an inherited attribute, a base class.
    """

    owner: ModuleType | type
    name: str
    value: Any
    defined_in: ModuleType | type


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """State of one record at the time of the call.

    Attributes:
        id: Id of the record; `target`, `versions`, `why` and `remove_when` are the record's as well.
        applied: The replacement is in force; of a write: patches may make it now.
        skipped: Why the record was left out from the start; empty when it was carried out (and maybe reverted since).
        aliases_found: Places such as ``"module:name"`` in loaded host modules that hold the replacement, the target
            itself apart, sorted. Contains modules that were imported after applying.
        aliases_outside: Places that hold the replacement in modules of other packages, the script among them.
        aliases_missing: Declared aliases in loaded modules that do not hold the replacement. A declared alias in a
            module that is not loaded is not missing: it gets the replacement when the module is imported.
        foreign_wrapper: Module of the other package that had replaced or wrapped the target before us, or empty.
        written: The write was made and not undone yet; None of a replacement.
    """

    id: str
    target: str
    versions: str
    applied: bool
    skipped: str
    aliases_found: tuple[str, ...]
    aliases_outside: tuple[str, ...]
    aliases_missing: tuple[str, ...]
    foreign_wrapper: str
    why: str
    remove_when: str
    written: bool | None = None

    @property
    def state(self) -> str:
        """One word: ``applied``, ``skipped`` or ``reverted``; of a write ``ready`` or ``written``."""
        if self.skipped:
            return "skipped"
        if not self.applied:
            return "reverted"
        return "applied" if self.written is None else "written" if self.written else "ready"


def format_status(statuses: Iterable[PatchStatus]) -> str:
    """Render statuses as an aligned text table: one row each, in the given order, with indented remarks below it.

    >>> status = PatchStatus(
    ...     id="X1", target="host.state:setup", versions=">=1,<2", applied=True, skipped="",
    ...     aliases_found=("host.a:f",), aliases_outside=(), aliases_missing=(),
    ...     foreign_wrapper="", why="only place", remove_when="never",
    ... )
    >>> print(format_status([status]))
    id  state    target            versions
    X1  applied  host.state:setup  >=1,<2
        why: only place
        remove when: never
        aliases: host.a:f
    """
    statuses = list(statuses)
    rows = [("id", "state", "target", "versions"), *((s.id, s.state, s.target, s.versions) for s in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    heads = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines = [heads[0]]
    for head, status in zip(heads[1:], statuses, strict=True):
        lines += [head, *(f"    {remark}" for remark in _remarks(status))]
    return "\n".join(lines)


def _remarks(status: PatchStatus) -> list[str]:
    """Return the non-empty remarks of a status in the order of the table."""
    remarks = {
        "why": status.why,
        "remove when": status.remove_when,
        "skipped": status.skipped,
        "aliases": _shortened(status.aliases_found),
        "aliases in other packages": _shortened(status.aliases_outside),
        "DECLARED ALIASES MISSING": ", ".join(status.aliases_missing),
        "FOREIGN WRAPPER BELOW OURS": status.foreign_wrapper,
    }
    return [f"{name}: {text}" for name, text in remarks.items() if text]


def _shortened(items: Sequence[str], limit: int = 8) -> str:
    """Join texts; beyond the limit only say how many there are."""
    rest = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def resolve_target(target: str) -> Target:
    """Import the module of ``"package.module:path"`` and find the attribute, raw and together with its owner.

    Raises:
        LookupError: The path does not exist in the module.
        Exception: Whatever importing the module raises.

    >>> found = resolve_target("collections:Counter.fromkeys")
    >>> found.owner.__name__, found.name, type(found.value).__name__, found.defined_in.__name__
    ('Counter', 'fromkeys', 'classmethod', 'Counter')
    """
    module_name, _, path = target.partition(":")
    *classes, name = path.split(".")
    # Never "import a.b.c as m" or attribute walking: a package may hold a function under the name of its submodule.
    owner: ModuleType | type = importlib.import_module(module_name)
    for class_name in classes:
        value, _ = _find(owner, class_name)
        if not isinstance(value, type):
            raise LookupError(f"{class_name!r} in {_name_of(owner)} is not a class")
        owner = value
    value, defined_in = _find(owner, name)
    return Target(owner=owner, name=name, value=value, defined_in=defined_in)


def _find(owner: ModuleType | type, name: str) -> tuple[Any, ModuleType | type]:
    """Return the raw attribute and the module or class that holds it, along the method resolution order."""
    for place in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in namespace(place):
            return namespace(place)[name], place
    raise LookupError(f"{_name_of(owner)} has no attribute {name!r}")


def _name_of(owner: ModuleType | type) -> str:
    return f"class {owner.__qualname__}" if isinstance(owner, type) else f"module {owner.__name__}"


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
        record: its other attributes, as of :class:`Replacement`; without ``why`` and ``remove_when`` paragraphs of the
            function's docstring say that.

    The function asks for what it needs by the names of its parameters before ``original``. Several declarations may
    stand above one function.

    >>> @replaces("host.state:setup", id="X1", when="always")
    ... def shout(end, original, text):
    ...     '''Run `setup`, louder.
    ...
    ...     Why: nobody hears it.
    ...
    ...     Remove when: all hear it.
    ...     '''
    ...     return original(text) + end
    >>> (record,) = declared_by(shout)
    >>> record.id, record.why, record.remove_when
    ('X1', 'nobody hears it', 'all hear it')
    >>> record.needs, record.bound({"end": "!"}).build(str.upper)("hi")
    (('end',), 'HI!')
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
        said: dict[str, Any] = {"why": _said(function, "Why"), "remove_when": _said(function, "Remove when"), **record}
        found = Replacement(target=target, needs=needs, make=make(function), **said)
        setattr(function, _MARK, (found, *declared_by(function)))
        return function

    return declare


def _said(function: Callable[..., Any], what: str) -> str:
    """Return the paragraph of a docstring that begins with ``what:``; empty where there is none."""
    found = re.search(rf"^{what}: (.+?)\.(?:\n\n|\Z)", inspect.getdoc(function) or "", re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


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
