"""Applies records: all or none, reported and undone.

Carry out patch records: resolve and check everything, build everything, then set all or none.

The order of the steps makes it safe. Nothing of the host changes before every target is found and checked, and every
replacement is built. From then on every change is an entry of one undo stack.
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, NoReturn

from vtp_plugin.errors import PatchError
from vtp_plugin.host.patching.names import (
    Hit,
    count_references,
    detect,
    find,
    find_in_modules,
    held,
    is_own,
    shown_module,
)
from vtp_plugin.host.patching.record import (
    MARKER,
    PatchRecord,
    PatchStatus,
    Record,
    Target,
    WriteRecord,
    attributes,
    chain,
    describe,
    foreign_wrapper,
    functions,
    resolve_target,
    wrong_kind,
)
from vtp_plugin.util.undo import ABSENT, Name, UndoStack, namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A record with its original and its replacement.

    Attributes:
        record: what was asked for.
        target: where, and the original.
        new: the replacement.
        foreign: module of another package that has wrapped the original, or empty.
        num_holders: how many references there were to the original, and to the function inside it: from its target and
            whatever else held it.
    """

    record: PatchRecord
    target: Target
    new: object
    foreign: str
    num_holders: list[int]

    @property
    def swaps(self) -> tuple[tuple[object, object], ...]:
        """The original and its replacement, for a search.

        Nothing if the owner only inherits the original: what holds it may mean the method of the base class.
        """
        return () if self.target.defined_in is not self.target.owner else _pairs(self.target.value, self.new)

    @property
    def hit(self) -> Hit:
        """The target itself."""
        place = Name(self.target.owner, self.target.name)
        of = id(self.target.value)
        return Hit(where=self.record.target, module=self.record.module, of=of, place=place, new=self.new)


def parts(value: Any) -> list[Any]:
    """Return what may be held of an attribute: itself and, of a staticmethod or classmethod, the function inside."""
    return [value, value.__func__] if isinstance(value, staticmethod | classmethod) else [value]


def _pairs(old: Any, new: Any) -> tuple[tuple[object, object], ...]:
    """Pair an attribute, and what is inside it, with its counterpart."""
    return tuple(zip(parts(old), parts(new), strict=True))


@dataclass(frozen=True, slots=True)
class PatchedPackage:
    """The package that is patched: the prefix of its module names, its version, and its parts that may be absent.

    Besides, packages that are built on it.
    """

    prefix: str
    version: str
    optional_packages: tuple[str, ...] = ()
    built_on_it: tuple[str, ...] = ()

    def owns(self, module: str) -> bool:
        """Tell whether a module belongs to the host."""
        return _is_in(module, self.prefix)

    def may_patch(self, record: Record) -> bool:
        """Tell whether a target belongs to the host, or is a method of what is built on it: no alias is looked for."""
        is_method = "." in record.target.partition(":")[2]
        return self.owns(record.module) or (is_method and any(_is_in(record.module, one) for one in self.built_on_it))

    def absent_package(self, module: str, error: Exception) -> str:
        """Name the optional package of a module if an import error only says that it is not installed; else "".

        If the package is there and the module is not, the module has moved or fails itself: that is an error.
        """
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return next((name for name in self.optional_packages if name == missing and _is_in(module, name)), "")

    def fail(self, record: Record, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the error of a record."""
        raise PatchError(f"patch {record.id} on {record.target} ({self.prefix} {self.version}): {reason}") from cause


def _is_in(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@dataclass(kw_only=True, eq=False)
class AppliedPatches:
    """What one :func:`apply_records` set: the handle to report and to undo it.

    Attributes:
        host: what was patched.
        records: all that were given, in that order.
        skipped: why a record was left out, by the Python `id` of the record.
        patches: those that were carried out.
        undo: their assignments.
        places: what holds a replacement, each with its patch: the targets, and what else was found.
        active: whether the replacements are in force: :meth:`revert` has not run yet.
        rebuilt: replacements that were rebuilt, around what another package has put below them.
        is_reached: whether nothing held an original but names of modules, which now hold its replacement.
        num_references: how many references there were to each replacement, and its parts, when all were set.
    """

    host: PatchedPackage
    records: tuple[Record, ...]
    skipped: Mapping[int, str]
    patches: tuple[Patch, ...]
    undo: UndoStack = field(default_factory=UndoStack)
    places: list[tuple[Patch, Hit]] = field(default_factory=list[tuple[Patch, Hit]])
    active: bool = True
    rebuilt: list[object] = field(default_factory=list[object])
    is_reached: bool = False
    num_references: list[int] = field(default_factory=list[int])

    @property
    def unreached(self) -> tuple[str, ...]:
        """Where originals stay that were taken before applying, see :func:`unreached`; looked for when asked."""
        return unreached([self])

    def put(self, patch: Patch, hit: Hit) -> None:
        """Make a place hold a replacement."""
        self.undo.put(hit.place, hit.new)
        self.places.append((patch, hit))

    def find_places(self) -> list[tuple[Patch, Hit]]:
        """List the places that hold an original by a name, and are to hold its replacement.

        Raises:
            PatchError: A replacement is in the host already, or there twice: :meth:`revert` could not tell our bindings
                from those that were there before.
        """
        of, known, new = self._by_original(), self._known(), {id(patch.new): patch for patch in self.patches}
        in_use = [patch for patch in self.patches if new[id(patch.new)] is not patch]
        is_new = max(count_references([patch.new for patch in self.patches]), default=1) == 1
        hits = find_in_modules((patch.target.name, *pair) for patch in self.patches for pair in patch.swaps)
        self.is_reached = is_new and self._are_all(hits)
        if not self.is_reached:
            hits = find([*_swaps(self.patches), *((patch.new, patch.new) for patch in self.patches)], self.host.owns)
        in_use += [new[hit.of] for hit in hits if hit.of in new and self.host.owns(hit.module)]
        for patch in in_use:
            reason = "its replacement is in use elsewhere; build must return a new object (wrap the old one)"
            self.host.fail(patch.record, reason)
        return [(of[hit.of], hit) for hit in hits if hit.of in of and hit.place.key not in known]

    def _are_all(self, hits: Sequence[Hit]) -> bool:
        """Tell whether these places and the targets are all that holds the originals."""
        places = {(hit.of, hit.place.key) for hit in (*hits, *(patch.hit for patch in self.patches))}
        found = Counter(of for of, _ in places)
        # The first part is in its `Target`, too, and holds the second.
        return all(
            held == found[id(part)] + 1
            for patch in self.patches
            if patch.swaps
            for part, held in zip(parts(patch.target.value), patch.num_holders, strict=True)
        )

    def note_references(self) -> None:
        """Count what refers to the replacements now that all are set: whoever takes one later is seen by it."""
        self.num_references = self._count()

    def _count(self) -> list[int]:
        return [number for patch in self.patches for number in count_references(parts(patch.new))]

    def _is_untouched(self) -> bool:
        """Tell whether the replacements are where they were put, and nowhere else."""
        are_there = all(hit.place.get() is hit.new for _, hit in self.places)
        return are_there and not self.rebuilt and self._count() == self.num_references

    def revert(self) -> None:
        """Put every original back, the identical object, in reverse order; a second call does nothing.

        Places that took the replacement after applying get the original too. What others have assigned meanwhile stays
        outside the host, and where patches have written values.

        Raises:
            PatchError: Somebody has replaced one of our replacements in the host. Nothing is changed then.
        """
        if not self.active:
            return
        found, known = self._replacements(), self._known()
        for patch, hit in self.places:
            if self.host.owns(hit.module) and (current := hit.place.get()) is not hit.new:
                now = "deleted" if current is ABSENT else describe(current)
                self.host.fail(patch.record, f"cannot revert: {hit.where} is now {now}; undo that first, then revert")
        late = [hit for _, hit in found if hit.place.key not in known]
        for record in reversed(self.records):
            if isinstance(record, WriteRecord):
                record.undo()
        for hit in reversed(late):
            hit.place.put(hit.new)
        self.undo.undo()
        self.active = False

    def status(self) -> tuple[PatchStatus, ...]:
        """Report every record that was given to :func:`apply_records`, in that order, as things are now."""
        patches = {id(patch.record): patch for patch in self.patches}
        found = self._replacements() if self.active else []
        return tuple(self._status(record, patches.get(id(record)), found) for record in self.records)

    def taken_before(self, value: object) -> str:
        """Say which import to move if a callable is, or calls, an original that was taken before applying; else "".

        Looked through: partial objects, bound methods, wrappers, closures, defaults, and attributes of a callable.
        """
        of = self._originals
        seen: set[int] = set()
        ahead = [value]
        while ahead:
            link = ahead.pop()
            if id(link) in seen:
                continue
            seen.add(id(link))
            if id(link) in of:
                return self._line_to_move(of[id(link)])
            # Not below a replacement: it calls the original as it should.
            if MARKER not in attributes(link):
                ahead += [part for part in _parts(link) if callable(part) and not isinstance(part, type | ModuleType)]
        return ""

    @functools.cached_property
    def _originals(self) -> dict[int, Patch]:
        """By the `id` of an original, or of what it wraps, what replaces it; every step asks."""
        return {id(link): patch for patch in self.patches for link in (patch.target.value, *chain(patch.target.value))}

    def _line_to_move(self, patch: Patch) -> str:
        """Write the imports of a target outside the host as the scripts have them, the main script's first."""
        name = patch.target.name
        hosts = [patch.record.module, *(place.owner.__name__ for place in self._names(patch, is_host=True, name=name))]
        line = f"from {min(hosts, key=len)} import {name}"
        places = sorted(self._names(patch, is_host=False), key=lambda place: place.owner.__name__ != "__main__")
        lines = [
            f"{shown_module(place.owner.__name__)}: {line}{'' if place.name == name else f' as {place.name}'}"
            for place in places[:3]
        ]
        return " and ".join(lines) or f"{shown_module('__main__')} or a module that it imports: {line}"

    def _names(self, patch: Patch, *, is_host: bool, name: str = "") -> list[Name]:
        """Return the names of modules that applying has made hold a replacement."""
        hits = [hit for other, hit in self.places if other is patch and self.host.owns(hit.module) is is_host]
        places = [hit.place for hit in hits if isinstance(hit.place, Name)]
        return [p for p in places if isinstance(p.owner, ModuleType) and name in ("", p.name)]

    def _is_in_force(self, patch: Patch) -> bool:
        now = patch.hit.place.get()
        return now is patch.new or any(now is new for new in self.rebuilt)

    def _by_original(self) -> dict[int, Patch]:
        return {id(old): patch for patch in self.patches for old, _ in patch.swaps}

    def _known(self) -> set[tuple[int, object]]:
        return {hit.place.key for _, hit in self.places}

    def _replacements(self) -> list[tuple[Patch, Hit]]:
        """Find what holds a replacement now; each hit that is not known says what original belongs there."""
        if self._is_untouched():
            return self.places
        pairs = [(patch, pair) for patch in self.patches for pair in _pairs(patch.new, patch.target.value)]
        of = {id(new): patch for patch, (new, _) in pairs}
        return [(of[hit.of], hit) for hit in find((pair for _, pair in pairs), self.host.owns)]

    def _status(self, record: Record, patch: Patch | None, found: Sequence[tuple[Patch, Hit]]) -> PatchStatus:
        places = [hit for other, hit in found if other is patch and hit.place.key != other.hit.place.key]
        is_write = isinstance(record, WriteRecord)
        applied = self.active and (is_write or (patch is not None and self._is_in_force(patch)))
        skipped = self.skipped.get(id(record), "")
        return PatchStatus(
            id=record.id,
            target=record.target,
            versions=record.versions,
            applied=applied and not skipped,
            skipped=skipped,
            aliases_found=tuple(hit.where for hit in places if self.host.owns(hit.module)),
            aliases_outside=tuple(hit.where for hit in places if not self.host.owns(hit.module)),
            aliases_missing=tuple(a for a in record.aliases if not _holds(a, patch.new)) if applied and patch else (),
            foreign_wrapper=patch.foreign if patch else "",
            why=record.why,
            remove_when=record.remove_when,
            written=record.is_written if is_write else None,
        )


def unreached(sets: Iterable[AppliedPatches]) -> tuple[str, ...]:
    """Name where originals stay that were taken before applying, as far as seen; nothing is changed.

    Args:
        sets: those in force count. One search for all of them: what a search costs hardly depends on for how much.

    Returns:
        Closures, containers and attributes, each with the name of what it holds; sorted.
    """
    patches = [patch for applied in sets if applied.active for patch in applied.patches]
    if not patches:
        return ()
    swaps = _swaps(patches)
    names = {id(old): patch.target.name for patch in patches for old, _ in patch.swaps}
    found = detect(swaps)
    if found:
        # Garbage is not worth a report.
        gc.collect()
        found = detect(swaps)
    return tuple(f"{where} ({names[key]})" for key, where in found)


def _swaps(patches: Iterable[Patch]) -> list[tuple[object, object]]:
    return [pair for patch in patches for pair in patch.swaps]


def _parts(link: Any) -> list[Any]:
    """Return what a callable is made of, and so may call."""
    if isinstance(link, MethodType):
        return [link.__func__, *attributes(link.__self__).values()]
    if isinstance(link, FunctionType | functools.partial):
        return [*(value for _, value, _ in held(link)), attributes(link).get("__wrapped__")]
    return list(attributes(link).values())


def _holds(place: str, obj: object) -> bool:
    """Tell whether a declared alias holds the object, or will: a module that is not loaded yet imports it later."""
    module_name, _, name = place.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        # Where the package is loaded, its module must be there.
        return module_name.rpartition(".")[0] not in sys.modules or importlib.util.find_spec(module_name) is not None
    return namespace(module).get(name) is obj


def apply_records(
    records: Iterable[Record],
    host_version: str,
    host_prefix: str = "megatron",
    optional_packages: tuple[str, ...] = ("megatron.training", "megatron.legacy"),
    built_on_it: tuple[str, ...] = ("mindspeed_mm",),
) -> AppliedPatches:
    """Apply the records that fit the version of the host: all of them or, on any failure, none.

    Args:
        records: The records, in the order in which they are set. Of writes the target is looked up only.
        host_version: PEP 440 version of the host package.
        host_prefix: Name of the host package. Only what it and its submodules define may be patched, and what is built
            on it; aliases are searched for, and replaced, in all loaded modules except those of this package.
        optional_packages: Parts of the host that need not be installed: records for them are skipped then.
        built_on_it: Packages besides, methods of whose classes may be patched.

    Returns:
        The handle to report and to undo.

    Raises:
        PatchError: A target does not exist or cannot be replaced, is the target of two records, is patched already,
            or its replacement could not be built or set. Nothing of the host is changed then.
    """
    host = PatchedPackage(host_prefix, host_version, optional_packages, built_on_it)
    records = tuple(records)
    skipped = _skip(records, host)
    found = [(record, require_target(record, host)) for record in records if id(record) not in skipped]
    _check_distinct(found, host)
    replaced = [(record, target) for record, target in found if isinstance(record, PatchRecord)]
    numbers = [count_references(parts(target.value)) for _, target in replaced]
    patches = [_build(*one, host, num_holders=held) for one, held in zip(replaced, numbers, strict=True)]
    applied = AppliedPatches(host=host, records=records, skipped=skipped, patches=tuple(patches))
    _set_all(applied)
    applied.note_references()
    return applied


def _skip(records: Sequence[Record], host: PatchedPackage) -> dict[int, str]:
    """Import the modules of all fitting targets; return `id(record)` -> reason for the records to leave out.

    Importing comes before every look-up, because importing one host module may change another one.
    """
    skipped: dict[int, str] = {}
    for record in records:
        try:
            fits = record.fits(host.version)
        except ValueError as error:
            host.fail(record, "Megatron's version is not a PEP 440 version; install a released package", error)
        if not fits:
            skipped[id(record)] = f"not for {host.prefix} {host.version}"
            continue
        if isinstance(record, PatchRecord) and not host.may_patch(record):
            host.fail(
                record, f"the target is not part of {host.prefix}, and nothing else may be patched; fix the record"
            )
        try:
            importlib.import_module(record.module)
        except Exception as error:
            package = host.absent_package(record.module, error)
            if not package:
                host.fail(record, f"importing its module fails with {error!r}; {_other_version(record)}", error)
            skipped[id(record)] = f"package {package} is absent"
    return skipped


def _other_version(record: Record) -> str:
    return f"the record is made for {record.versions}: install such a version or narrow the record's range"


def require_target(record: Record, host: PatchedPackage) -> Target:
    """Find the target of a record in the installed host; refuse the record where the host has none."""
    try:
        return resolve_target(record.target)
    except LookupError as error:
        host.fail(record, f"{error.args[0]}; {_other_version(record)}", error)


def _check_distinct(found: Sequence[tuple[Record, Target]], host: PatchedPackage) -> None:
    """Refuse two records for one target, also where it has two names in a module or a subclass inherits it."""
    taken: dict[object, Record] = {}
    for record, target in found:
        is_name = isinstance(target.owner, type) or isinstance(record, WriteRecord)
        key = (id(target.owner), target.name) if is_name else id(target.value)
        if key in taken:
            host.fail(record, f"record {taken[key].id} has the same target; join the two records")
        taken[key] = record
    for record, target in found:
        # A replacement on the subclass would wrap the base class's original, and so go past its replacement.
        base = taken.get((id(target.defined_in), target.name), record)
        if base is not record:
            host.fail(record, f"the method is inherited from the target of record {base.id}; join the two records")


def _check_target(record: PatchRecord, target: Target, host: PatchedPackage) -> None:
    """Refuse what cannot be patched, or is patched already."""
    value = target.value
    if not (callable(value) or isinstance(value, classmethod | property)):
        host.fail(record, f"it is a {type(value).__name__}, not a function, class, method or property; set it directly")
    for link in chain(value):
        if (other := attributes(link).get(MARKER)) is not None:
            host.fail(record, f"it is patched already (by record {other}); revert that first")
    if isinstance(value, type):
        _refuse_subclasses(record, value, host)


def _refuse_subclasses(record: PatchRecord, original: type, host: PatchedPackage) -> None:
    """Refuse a class that has subclasses outside the host: they, and their objects, would go past the replacement."""
    if next(_foreign_subclasses(original, host), None) is not None:
        # A class that nobody uses any more lives on until then: classes are part of reference cycles.
        gc.collect()
    for subclass in _foreign_subclasses(original, host):
        where, name = shown_module(subclass.__module__), original.__name__
        host.fail(
            record,
            f"{where} has made class {subclass.__qualname__} from it already, which would go past the replacement; "
            f"move vtp_plugin.apply() above the line in {where} that imports {name}",
        )


def _foreign_subclasses(original: type, host: PatchedPackage) -> Iterator[type]:
    """Yield the classes outside the host that are made from a class, at any distance."""
    for subclass in type.__subclasses__(original):
        if not host.owns(subclass.__module__) and not is_own(subclass.__module__):
            yield subclass
        yield from _foreign_subclasses(subclass, host)


def _build(record: PatchRecord, target: Target, host: PatchedPackage, *, num_holders: list[int]) -> Patch:
    """Check the target and build its replacement."""
    _check_target(record, target, host)
    return Patch(
        record=record,
        target=target,
        new=_replace(record, target.value, host),
        foreign=foreign_wrapper(target, host.owns),
        num_holders=num_holders,
    )


def rebuild(applied: AppliedPatches, patch: Patch, below: Any) -> Any:
    """Rebuild a replacement, around what another package has put in the place of the original since.

    Args:
        applied: the set that the patch belongs to.
        patch: the patch.
        below: what the replacement is to call, as an attribute look-up gives it; of a classmethod the bound method.

    Returns:
        The replacement, in the same kind of descriptor as the first original; `below` if it is, or calls, ours already.
    """
    kind = type(patch.target.value)
    inner = below.__func__ if issubclass(kind, classmethod) and isinstance(below, MethodType) else below
    if any(attributes(link).get(MARKER) == patch.record.id for link in chain(inner)):
        return below
    old = kind(inner) if issubclass(kind, staticmethod | classmethod) else inner
    applied.rebuilt.append(new := _replace(patch.record, old, applied.host))
    return new


def _replace(record: PatchRecord, old: Any, host: PatchedPackage) -> Any:
    """Build and mark the replacement of an attribute, in the same kind of descriptor."""
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


def _set_all(applied: AppliedPatches) -> None:
    """Set every target and its aliases; on a failure in the host restore what was set."""
    aliases = applied.find_places()
    targets = {patch.hit.place.key: (patch, patch.hit) for patch in applied.patches}
    places = [*targets.values(), *(found for found in aliases if found[1].place.key not in targets)]
    try:
        for patch, hit in places:
            try:
                applied.put(patch, hit)
            except Exception as error:
                if applied.host.owns(hit.module):
                    reason = f"setting {hit.where} fails with {error!r}; choose another seam"
                    applied.host.fail(patch.record, reason, error)
                # Another package that refuses to be changed is no reason to fail: it is detected, and named.
    except BaseException:
        applied.undo.undo()
        raise
