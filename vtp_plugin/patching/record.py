"""What a patch is (:class:`PatchRecord`), where its target lies (:class:`Target`) and what became of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from vtp_plugin.errors import PatchError

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"{_DOTTED}:{_DOTTED}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchRecord:
    """One replacement of one object of the host package.

    A record does nothing by itself; :func:`vtp_plugin.patching.apply_records` carries it out.

    Attributes:
        id: Short name used in messages and tables, such as ``"H4"``.
        target: ``"package.module:function"``, ``"package.module:Class"`` or ``"package.module:Class.method"``. The
            module is the one that defines the object. It may be a function, class, method or property; constants are
            refused, because they cannot be told apart by identity.
        build: Gets the original object and returns its replacement, a new object. Of a staticmethod or classmethod it
            gets the plain function and returns a plain function: the engine keeps the kind. Wrappers use
            :func:`functools.wraps`. It may be called for an apply that fails later, so it must have no other effect.
        why: Why this seam and not another one.
        versions: Versions of the host as a PEP 440 specifier, such as ``">=0.19,<0.20"``.
        remove_when: What makes the record superfluous.
        aliases: Places ``"package.module:name"`` that are known to hold the target through a from-import. The engine
            finds aliases by identity and does not need this list: it makes a changed host visible in the status.
        optional: The target's module may legitimately be absent; the status then says so.
        refuse_foreign: Fail when another package has wrapped the target already, instead of wrapping its wrapper.

    Raises:
        PatchError: The target, an alias or the version range is malformed.

    >>> record = PatchRecord(
    ...     id="X1", target="host.state:setup", build=lambda f: f, why="...", versions=">=1,<2", remove_when="never"
    ... )
    >>> record.module, record.path, record.fits("1.4.2"), record.fits("2.0")
    ('host.state', ('setup',), True, False)
    """

    id: str
    target: str
    build: Callable[[Any], Any]
    why: str
    versions: str
    remove_when: str
    aliases: tuple[str, ...] = ()
    optional: bool = False
    refuse_foreign: bool = False

    def __post_init__(self) -> None:
        for place in (self.target, *self.aliases):
            if not _TARGET.fullmatch(place):
                raise PatchError(f"patch {self.id}: {place!r} is not of the form 'package.module:Name'; fix the record")
        try:
            SpecifierSet(self.versions)
        except InvalidSpecifier as error:
            raise PatchError(
                f"patch {self.id}: {self.versions!r} is not a version range; write it like '>=0.19,<0.20'"
            ) from error

    @property
    def module(self) -> str:
        """Full name of the module that the target lives in."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> tuple[str, ...]:
        """Names that lead from the module to the target, at least one."""
        return tuple(self.target.partition(":")[2].split("."))

    def fits(self, host_version: str) -> bool:
        """Tell whether the record is made for this version; pre-releases of versions in the range count.

        Raises:
            packaging.version.InvalidVersion: `host_version` is not a PEP 440 version.
        """
        return SpecifierSet(self.versions).contains(Version(host_version), prereleases=True)

    def may_miss(self, error: Exception) -> bool:
        """Tell whether an import error only says that the module of an optional record is absent.

        A module that is there but lacks something that it imports itself is not absent.
        """
        missing = isinstance(error, ModuleNotFoundError) and f"{self.module}.".startswith(f"{error.name}.")
        return self.optional and missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An attribute as it lies in a namespace: descriptors are not bound.

    Attributes:
        owner: Module or class on which a replacement is set; a class that only inherits the attribute is possible.
        name: Name of the attribute.
        value: The raw object, possibly a staticmethod, classmethod or property object.
        defined_in: Module or class whose own namespace holds `value`.
    """

    owner: ModuleType | type
    name: str
    value: Any
    defined_in: ModuleType | type


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchStatus:
    """State of one record at the time of the call.

    Attributes:
        id: As in the record; so are `target`, `versions`, `why` and `remove_when`.
        applied: The replacement is in force.
        skipped: Why the record was left out from the start; empty when it was carried out (and maybe reverted since).
        aliases_found: Places such as ``"module:name"`` in loaded host modules that hold the replacement, the target
            itself apart, sorted. Contains modules that were imported after applying.
        aliases_outside: The same in modules of other packages, the script among them.
        aliases_missing: Declared aliases in loaded modules that do not hold the replacement. A declared alias in a
            module that is not loaded is not missing: it gets the replacement when the module is imported.
        foreign_wrapper: Module of the other package that had replaced or wrapped the target before us, or empty.
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

    @property
    def state(self) -> str:
        """One word: ``applied``, ``skipped`` or ``reverted``."""
        if self.skipped:
            return "skipped"
        return "applied" if self.applied else "reverted"


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
    """Join texts, at most some of them."""
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


def namespace(owner: ModuleType | type) -> Mapping[str, Any]:
    """Return the own attributes without running code of the owner: a lazy module stays unloaded."""
    # Neither vars() nor isinstance() here: both make importlib's lazy modules load.
    return object.__getattribute__(owner, "__dict__")


def _find(owner: ModuleType | type, name: str) -> tuple[Any, ModuleType | type]:
    """Return the raw attribute and the namespace owner that holds it, along the method resolution order."""
    for place in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in namespace(place):
            return namespace(place)[name], place
    raise LookupError(f"{_name_of(owner)} has no attribute {name!r}")


def _name_of(owner: ModuleType | type) -> str:
    return f"class {owner.__qualname__}" if isinstance(owner, type) else f"module {owner.__name__}"
