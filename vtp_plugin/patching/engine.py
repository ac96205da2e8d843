"""Carry out patch records: resolve and check everything, build everything, then set all or none.

The order of the steps is the safety: nothing of the host changes before every target was found, checked and its
replacement built, and from then on every change is an entry of one undo list.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Final, NoReturn

from packaging.version import InvalidVersion

from vtp_plugin.errors import PatchError
from vtp_plugin.patching.objects import attributes, chain, describe, foreign_wrapper, functions, wrong_kind
from vtp_plugin.patching.record import PatchRecord, PatchStatus, Target, namespace, resolve_target

MARKER: Final = "__vtp_record__"
"""Attribute of every replacement (of a property: of its accessors); holds the id of its record."""

_ABSENT: Final = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """One assignment and its undo; `old` is `_ABSENT` where the owner has no such attribute of its own."""

    where: str
    owner: ModuleType | type
    name: str
    old: object
    new: object

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def current(self) -> object:
        return namespace(self.owner).get(self.name, _ABSENT)

    def set(self) -> None:
        setattr(self.owner, self.name, self.new)

    def restore(self) -> None:
        if self.old is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patch:
    """A record with its original and its replacement; `slots[0]` is the target itself, the others are aliases."""

    record: PatchRecord
    target: Target
    new: object
    foreign: str
    slots: tuple[_Slot, ...]


@dataclass(frozen=True, slots=True)
class _Host:
    """The package that is patched: the prefix of its module names, and its version."""

    prefix: str
    version: str

    def owns(self, module: str) -> bool:
        return module == self.prefix or module.startswith(self.prefix + ".")

    def fail(self, record: PatchRecord, reason: str, cause: BaseException | None = None) -> NoReturn:
        raise PatchError(f"patch {record.id} on {record.target} ({self.prefix} {self.version}): {reason}") from cause

    def bindings(self, objects: Iterable[object]) -> dict[int, list[_Slot]]:
        """Find the names in loaded host modules that hold one of the objects.

        Returns:
            `id(object)` -> slots with `old` and `new` both set to the object, sorted by module name.
        """
        wanted = {id(obj) for obj in objects}
        found: dict[int, list[_Slot]] = {key: [] for key in wanted}
        seen: set[int] = set()
        for module_name in sorted(filter(self.owns, list(sys.modules))):
            module = sys.modules.get(module_name)
            # The type is asked, since isinstance would ask a lazy module for its __class__ and so load it.
            if not issubclass(type(module), ModuleType) or id(module) in seen:
                continue
            assert module is not None
            seen.add(id(module))
            for name, value in list(namespace(module).items()):
                if id(value) in wanted:
                    slot = _Slot(where=f"{module_name}:{name}", owner=module, name=name, old=value, new=value)
                    found[id(value)].append(slot)
        return found


class AppliedPatches:
    """The patches that one :func:`apply_records` set: the handle to report and to undo them."""

    def __init__(
        self, host: _Host, patches: Sequence[_Patch], skipped: Mapping[int, str], records: Sequence[PatchRecord]
    ):
        self._host = host
        self._patches = tuple(patches)
        self._skipped = dict(skipped)
        self._records = tuple(records)
        self._active = True

    @property
    def active(self) -> bool:
        """Tell whether the replacements are in force, that is :meth:`revert` has not run yet."""
        return self._active

    def revert(self) -> None:
        """Put every original back, the identical object, in reverse order; a second call does nothing.

        Names in host modules that were imported after applying hold the replacement: they get the original too.

        Raises:
            PatchError: Somebody else has replaced one of our replacements meanwhile. Nothing is changed then.
        """
        if not self._active:
            return
        slots = [slot for patch in self._patches for slot in patch.slots]
        for patch in self._patches:
            for slot in patch.slots:
                if (current := slot.current()) is not slot.new:
                    now = "deleted" if current is _ABSENT else describe(current)
                    self._host.fail(
                        patch.record,
                        f"cannot revert: {slot.where} is now {now}; undo that first, then revert",
                    )
        known = {slot.key for slot in slots}
        for patch, bindings in self._bindings():
            for late in bindings:
                if late.key not in known:
                    slots.append(
                        _Slot(where=late.where, owner=late.owner, name=late.name, old=patch.target.value, new=patch.new)
                    )
        _restore(slots)
        self._active = False

    def status(self) -> tuple[PatchStatus, ...]:
        """Report every record that was given to :func:`apply_records`, in that order, as things are now."""
        aliases = {id(patch.record): slots for patch, slots in self._bindings()} if self._active else {}
        patches = {id(patch.record): patch for patch in self._patches}
        return tuple(
            self._status(record, patches.get(id(record)), aliases.get(id(record), ())) for record in self._records
        )

    def _status(self, record: PatchRecord, patch: _Patch | None, bindings: Sequence[_Slot]) -> PatchStatus:
        applied = self._active and patch is not None and patch.slots[0].current() is patch.new
        return PatchStatus(
            id=record.id,
            target=record.target,
            versions=record.versions,
            applied=applied,
            skipped=self._skipped.get(id(record), ""),
            aliases_found=tuple(slot.where for slot in bindings if patch and slot.key != patch.slots[0].key),
            aliases_missing=tuple(a for a in record.aliases if not _holds(a, patch.new)) if applied and patch else (),
            foreign_wrapper=patch.foreign if patch else "",
            why=record.why,
            remove_when=record.remove_when,
        )

    def _bindings(self) -> Iterator[tuple[_Patch, list[_Slot]]]:
        """Yield every patch with all names in loaded host modules that hold its replacement now."""
        found = self._host.bindings(patch.new for patch in self._patches)
        for patch in self._patches:
            yield patch, found[id(patch.new)]


def apply_records(records: Iterable[PatchRecord], host_version: str, host_prefix: str = "megatron") -> AppliedPatches:
    """Apply the records that fit the version of the host: all of them or, on any failure, none.

    Args:
        records: The records, in the order in which they are set.
        host_version: PEP 440 version of the host package.
        host_prefix: Name of the host package. Only it and its submodules are searched for aliases and may be patched.

    Returns:
        The handle to report and to undo.

    Raises:
        PatchError: A target does not exist or cannot be replaced, is the target of two records, is patched already,
            or its replacement could not be built or set. Nothing of the host is changed then.
    """
    host = _Host(host_prefix, host_version)
    records = tuple(records)
    skipped = _skip(records, host)
    selected = [record for record in records if id(record) not in skipped]
    found = [(record, _lookup(record, host)) for record in selected]
    _check_distinct(found, host)
    built = [
        (record, target, _check_target(record, target, host), _build(record, target, host)) for record, target in found
    ]
    patches = _plan(built, host)
    _set_all(patches, host)
    return AppliedPatches(host, patches, skipped, records)


def _skip(records: Sequence[PatchRecord], host: _Host) -> dict[int, str]:
    """Import the modules of all fitting targets; return `id(record)` -> reason for the records to leave out.

    Importing comes before every look-up, because importing one host module may change another one.
    """
    skipped: dict[int, str] = {}
    for record in records:
        try:
            fits = record.fits(host.version)
        except InvalidVersion as error:
            host.fail(record, "the host's version is not a PEP 440 version; install a released package", error)
        if not fits:
            skipped[id(record)] = f"not for {host.prefix} {host.version}"
            continue
        if not host.owns(record.module):
            host.fail(
                record, f"the target is not part of {host.prefix}, and nothing else may be patched; fix the record"
            )
        try:
            importlib.import_module(record.module)
        except Exception as error:
            if not record.may_miss(error):
                host.fail(record, f"importing its module fails with {error!r}; {_other_version(record)}", error)
            skipped[id(record)] = f"module {record.module} is absent"
    return skipped


def _other_version(record: PatchRecord) -> str:
    return f"the record is made for {record.versions}: install such a version or narrow the record's range"


def _lookup(record: PatchRecord, host: _Host) -> Target:
    try:
        return resolve_target(record.target)
    except LookupError as error:
        host.fail(record, f"{error.args[0]}; {_other_version(record)}", error)


def _check_distinct(found: Sequence[tuple[PatchRecord, Target]], host: _Host) -> None:
    """Refuse two records for one target, also under two names of a module-level object or through inheritance."""
    taken: dict[object, PatchRecord] = {}
    for record, target in found:
        key = (id(target.owner), target.name) if isinstance(target.owner, type) else id(target.value)
        if key in taken:
            host.fail(record, f"record {taken[key].id} has the same target; join the two records")
        taken[key] = record
    for record, target in found:
        # The wrapper set on the subclass would go past the one on the base class.
        base = taken.get((id(target.defined_in), target.name), record)
        if base is not record:
            host.fail(record, f"the method is inherited from the target of record {base.id}; join the two records")


def _check_target(record: PatchRecord, target: Target, host: _Host) -> str:
    """Refuse what cannot be patched (again); return the module of a foreign wrapper or an empty string."""
    value = target.value
    if not (callable(value) or isinstance(value, classmethod | property)):
        host.fail(record, f"it is a {type(value).__name__}, not a function, class, method or property; set it directly")
    for link in chain(value):
        if (other := attributes(link).get(MARKER)) is not None:
            host.fail(record, f"it is patched already (by record {other}); revert that first")
    foreign = foreign_wrapper(target, host.owns)
    if foreign and record.refuse_foreign:
        host.fail(
            record, f"{foreign} has replaced or wrapped it; switch off that feature or load this plugin without it"
        )
    return foreign


def _build(record: PatchRecord, target: Target, host: _Host) -> object:
    """Build and mark the replacement, in the same kind of descriptor as the original."""
    old = target.value
    wrapped = isinstance(old, staticmethod | classmethod)
    inner = old.__func__ if wrapped else old
    try:
        new = record.build(inner)
    except Exception as error:
        host.fail(record, f"building its replacement fails with {error!r}; this is a bug in the patch", error)
    if (wrong := wrong_kind(inner, new)) is not None:
        host.fail(record, f"its build returned {wrong}; this is a bug in the patch")
    try:
        for carrier in functions(new):
            if not any(carrier is function for function in functions(inner)):
                setattr(carrier, MARKER, record.id)
    except (AttributeError, TypeError) as error:
        host.fail(record, f"a {type(new).__name__} cannot carry the marker; return a function or a class", error)
    return type(old)(new) if wrapped else new


def _plan(built: Sequence[tuple[PatchRecord, Target, str, object]], host: _Host) -> list[_Patch]:
    """List every assignment: the targets and, for module-level objects, their aliases in loaded host modules.

    A module-level name of a method is no alias: it may mean the method of a base class that the target inherits.
    """
    modules = [(target.value, new) for _, target, _, new in built if not isinstance(target.owner, type)]
    found = host.bindings(obj for pair in modules for obj in pair)
    patches: list[_Patch] = []
    for record, target, foreign, new in built:
        # Otherwise revert could not tell our bindings from the ones that were there before.
        if found.get(id(new)) or any(new is patch.new for patch in patches):
            host.fail(record, "its replacement is in use elsewhere; build must return a new object (wrap the old one)")
        inherited = target.defined_in is not target.owner
        old = _ABSENT if inherited else target.value
        first = _Slot(where=record.target, owner=target.owner, name=target.name, old=old, new=new)
        others = () if isinstance(target.owner, type) else found[id(target.value)]
        aliases = (
            _Slot(where=slot.where, owner=slot.owner, name=slot.name, old=slot.old, new=new)
            for slot in others
            if slot.key != first.key
        )
        patches.append(_Patch(record=record, target=target, new=new, foreign=foreign, slots=(first, *aliases)))
    return patches


def _set_all(patches: Sequence[_Patch], host: _Host) -> None:
    """Set every slot in order; on a failure restore the ones that were set."""
    done: list[_Slot] = []
    try:
        for patch in patches:
            for slot in patch.slots:
                try:
                    slot.set()
                except Exception as error:
                    host.fail(patch.record, f"setting {slot.where} fails with {error!r}; choose another seam", error)
                done.append(slot)
    except BaseException:
        _restore(done)
        raise


def _restore(slots: Sequence[_Slot]) -> None:
    for slot in reversed(slots):
        slot.restore()


def _holds(place: str, obj: object) -> bool:
    """Tell whether a declared alias holds the object, or will: a module that is not loaded yet imports it later."""
    module_name, _, name = place.partition(":")
    module = sys.modules.get(module_name)
    return module is None or namespace(module).get(name) is obj
