"""What one :func:`~vtp_plugin.patching.engine.apply_records` set: reported, extended to late names, and undone."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NoReturn

from vtp_plugin.errors import PatchError
from vtp_plugin.patching.objects import MARKER, attributes, chain, describe
from vtp_plugin.patching.places import ABSENT, Name, Place
from vtp_plugin.patching.record import PatchRecord, PatchStatus, Target, namespace
from vtp_plugin.patching.search import Found, Hit, find, shown_module

_OWN: Final = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One assignment and its undo; `old` is `ABSENT` where the owner has no such attribute of its own.

    Outside the host others may assign to the place too: `is_host` is False there.
    """

    where: str
    place: Place
    old: object
    new: object
    is_host: bool = True

    def set(self) -> None:
        """Make the place hold the new object."""
        self.place.put(self.new)

    def restore(self) -> None:
        """Make the place hold the old object."""
        self.place.put(self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """A record with its original and its replacement; `slots[0]` is the target itself, the others are aliases."""

    record: PatchRecord
    target: Target
    new: object
    foreign: str
    slots: tuple[Slot, ...]

    @property
    def swaps(self) -> tuple[tuple[object, object], ...]:
        """The original and its replacement, for a search.

        None if the owner only inherits the original: a name may mean the method of the base class.
        """
        return () if self.target.defined_in is not self.target.owner else swaps_of(self.target.value, self.new)


def swaps_of(old: Any, new: Any) -> tuple[tuple[object, object], ...]:
    """Pair an attribute with its counterpart; of a staticmethod or classmethod the functions inside besides."""
    inside = ((old.__func__, new.__func__),) if isinstance(old, staticmethod | classmethod) else ()
    return ((old, new), *inside)


@dataclass(frozen=True, slots=True)
class Host:
    """The package that is patched: the prefix of its module names, and its version."""

    prefix: str
    version: str

    def owns(self, module: str) -> bool:
        """Tell whether a module belongs to the host."""
        return module == self.prefix or module.startswith(self.prefix + ".")

    def fail(self, record: PatchRecord, reason: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the error of a record."""
        raise PatchError(f"patch {record.id} on {record.target} ({self.prefix} {self.version}): {reason}") from cause

    def slots(self, hits: Iterable[Hit], known: Container[tuple[int, object]]) -> Iterator[tuple[int, Slot]]:
        """Yield `id` of the object and the assignment for every place that is not known yet."""
        for hit in hits:
            if hit.place.key not in known:
                is_host = self.owns(hit.module)
                yield hit.of, Slot(where=hit.where, place=hit.place, old=hit.old, new=hit.new, is_host=is_host)


def is_own(module: str) -> bool:
    """Tell whether a module belongs to the package that this engine is part of: it keeps originals on purpose."""
    return module == _OWN or module.startswith(_OWN + ".")


def search(patches: Iterable[Sequence[tuple[object, object]]]) -> Found:
    """Search for what holds the originals; what stays is only reported when it is more than garbage."""
    swaps = [pair for pairs in patches for pair in pairs]
    found = find(swaps, is_own)
    if found.unreached:
        gc.collect()
        found = find(swaps, is_own)
    return found


class AppliedPatches:
    """The patches that one :func:`apply_records` set: the handle to report and to undo them."""

    def __init__(
        self,
        host: Host,
        patches: Sequence[Patch],
        skipped: Mapping[int, str],
        records: Sequence[PatchRecord],
        unreached: Sequence[tuple[int, str]],
    ):
        self._host = host
        self._patches = tuple(patches)
        self._skipped = dict(skipped)
        self._records = tuple(records)
        self._late: list[tuple[Patch, Slot]] = []
        self._unreached = tuple(unreached)
        self._active = True

    @property
    def active(self) -> bool:
        """Tell whether the replacements are in force, that is :meth:`revert` has not run yet."""
        return self._active

    @property
    def unreached(self) -> tuple[str, ...]:
        """Where originals stay that were taken before, as far as seen: in closures, containers and attributes."""
        of = {id(old): patch for patch in self._patches for old, _ in patch.swaps}
        return tuple(f"{where} ({of[key].target.name})" for key, where in self._unreached if key in of)

    def rebind(self) -> None:
        """Look for the originals once more, and let what holds them hold the replacements, as applying did."""
        of = {id(old): patch for patch in self._patches for old, _ in patch.swaps}
        found = search(patch.swaps for patch in self._patches)
        self._unreached = found.unreached
        for key, slot in self._host.slots(found.hits, self._known()):
            with contextlib.suppress(Exception):  # of an owner that does not let itself be changed
                slot.set()
                self._late.append((of[key], slot))

    def revert(self) -> None:
        """Put every original back, the identical object, in reverse order; a second call does nothing.

        Places that took the replacement after applying get the original too. Outside the host, what others have
        assigned meanwhile stays.

        Raises:
            PatchError: Somebody else has replaced one of our replacements in the host meanwhile. Nothing is changed
                then.
        """
        if not self._active:
            return
        slots = self._slots()
        for patch, slot in slots:
            if slot.is_host and (current := slot.place.get()) is not slot.new:
                now = "deleted" if current is ABSENT else describe(current)
                self._host.fail(patch.record, f"cannot revert: {slot.where} is now {now}; undo that first, then revert")
        undo = [slot for _, slot in slots if slot.place.get() is slot.new]
        found = find((pair for patch in self._patches for pair in swaps_of(patch.new, patch.target.value)), is_own)
        late = (slot for _, slot in self._host.slots(found.hits, self._known()))
        undo += [Slot(where=slot.where, place=slot.place, old=slot.new, new=slot.old) for slot in late]
        restore(undo)
        self._active = False

    def status(self) -> tuple[PatchStatus, ...]:
        """Report every record that was given to :func:`apply_records`, in that order, as things are now."""
        patches = {id(patch.record): patch for patch in self._patches}
        places: dict[int, list[Hit]] = {}
        if self._active:
            pairs = [(patch, pair) for patch in self._patches for pair in swaps_of(patch.new, patch.target.value)]
            of = {id(new): patch for patch, (new, _) in pairs}
            for hit in find((pair for _, pair in pairs), is_own).hits:
                if hit.place.key != of[hit.of].slots[0].place.key:
                    places.setdefault(id(of[hit.of].record), []).append(hit)
        return tuple(
            self._status(record, patches.get(id(record)), places.get(id(record), ())) for record in self._records
        )

    def taken_before(self, value: object) -> str:
        """Say what to move where a callable is, or calls, an original that was taken before applying; else "".

        Looked through: partial objects, bound methods, wrappers, closures, defaults, and attributes of a callable.
        """
        of = {id(link): patch for patch in self._patches for link in (patch.target.value, *chain(patch.target.value))}
        seen: set[int] = set()
        ahead = [value]
        while ahead:
            link = ahead.pop()
            if id(link) in seen:
                continue
            seen.add(id(link))
            if id(link) in of:
                return self._line_to_move(of[id(link)])
            # What wraps our replacement reaches the original through it.
            if MARKER not in attributes(link):
                ahead += [part for part in _parts(link) if callable(part) and not isinstance(part, type | ModuleType)]
        return ""

    def _line_to_move(self, patch: Patch) -> str:
        """Name the imports of a target outside the host as the scripts wrote them, the main one's first."""
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
        slots = [slot for other, slot in self._slots() if other is patch and slot.is_host is is_host]
        places = [slot.place for slot in slots if isinstance(slot.place, Name)]
        return [p for p in places if isinstance(p.owner, ModuleType) and name in ("", p.name)]

    def _slots(self) -> list[tuple[Patch, Slot]]:
        return [(patch, slot) for patch in self._patches for slot in patch.slots] + self._late

    def _known(self) -> set[tuple[int, object]]:
        return {slot.place.key for _, slot in self._slots()}

    def _status(self, record: PatchRecord, patch: Patch | None, places: Sequence[Hit]) -> PatchStatus:
        applied = self._active and patch is not None and patch.slots[0].place.get() is patch.new
        return PatchStatus(
            id=record.id,
            target=record.target,
            versions=record.versions,
            applied=applied,
            skipped=self._skipped.get(id(record), ""),
            aliases_found=tuple(hit.where for hit in places if self._host.owns(hit.module)),
            aliases_outside=tuple(hit.where for hit in places if not self._host.owns(hit.module)),
            aliases_missing=tuple(a for a in record.aliases if not _holds(a, patch.new)) if applied and patch else (),
            foreign_wrapper=patch.foreign if patch else "",
            why=record.why,
            remove_when=record.remove_when,
        )


def try_to_set(slot: Slot) -> bool:
    """Set a place outside the host, if its owner lets us."""
    try:
        slot.set()
    except Exception:
        return False
    return True


def restore(slots: Sequence[Slot]) -> None:
    """Undo assignments in reverse order."""
    for slot in reversed(slots):
        slot.restore()


def _parts(link: Any) -> list[Any]:
    """Return what a callable may call: what it is made of."""
    if isinstance(link, functools.partial):
        return [link.func, *link.args, *link.keywords.values()]
    if isinstance(link, MethodType):
        return [link.__func__, *attributes(link.__self__).values()]
    if not isinstance(link, FunctionType):
        return list(attributes(link).values())
    filled = [cell.cell_contents for cell in link.__closure__ or () if _is_filled(cell)]
    defaults = [*(link.__defaults__ or ()), *(link.__kwdefaults__ or {}).values()]
    return [*filled, *defaults, attributes(link).get("__wrapped__")]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not ABSENT
    except ValueError:
        return False


def _holds(place: str, obj: object) -> bool:
    """Tell whether a declared alias holds the object, or will: a module that is not loaded yet imports it later."""
    module_name, _, name = place.partition(":")
    module = sys.modules.get(module_name)
    return module is None or namespace(module).get(name) is obj
