"""What to change (:class:`PatchRecord`, :class:`WriteRecord`), where it is (:class:`Target`), and how it went."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeVar

from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions import SUPPORTED, check_range, is_in
from vtp_plugin.util.undo import ABSENT, Item, Name, Slot, UndoStack, namespace

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
