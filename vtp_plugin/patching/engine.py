"""Carry out patch records: resolve and check everything, build everything, then set all or none.

The order of the steps is the safety: nothing of the host changes before every target was found, checked and its
replacement built, and from then on every change is an entry of one undo list.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from packaging.version import InvalidVersion

from vtp_plugin.patching.applied import AppliedPatches, Host, Patch, Slot, is_own, restore, search
from vtp_plugin.patching.objects import MARKER, attributes, chain, foreign_wrapper, functions, wrong_kind
from vtp_plugin.patching.places import ABSENT, Name
from vtp_plugin.patching.record import PatchRecord, Target, resolve_target
from vtp_plugin.patching.search import named_among, shown_module


def apply_records(records: Iterable[PatchRecord], host_version: str, host_prefix: str = "megatron") -> AppliedPatches:
    """Apply the records that fit the version of the host: all of them or, on any failure, none.

    Args:
        records: The records, in the order in which they are set.
        host_version: PEP 440 version of the host package.
        host_prefix: Name of the host package. Only what it and its submodules define may be patched; aliases are
            searched for, and rebound, in all loaded modules but our own.

    Returns:
        The handle to report and to undo.

    Raises:
        PatchError: A target does not exist or cannot be replaced, is the target of two records, is patched already,
            or its replacement could not be built or set. Nothing of the host is changed then.
    """
    host = Host(host_prefix, host_version)
    records = tuple(records)
    skipped = _skip(records, host)
    selected = [record for record in records if id(record) not in skipped]
    found = [(record, _lookup(record, host)) for record in selected]
    _check_distinct(found, host)
    built = [
        (record, target, _check_target(record, target, host), _build(record, target, host)) for record, target in found
    ]
    patches, unreached = _plan(built, host)
    refused = _set_all(patches, host)
    return AppliedPatches(host, patches, skipped, records, (*unreached, *refused))


def _skip(records: Sequence[PatchRecord], host: Host) -> dict[int, str]:
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


def _lookup(record: PatchRecord, host: Host) -> Target:
    try:
        return resolve_target(record.target)
    except LookupError as error:
        host.fail(record, f"{error.args[0]}; {_other_version(record)}", error)


def _check_distinct(found: Sequence[tuple[PatchRecord, Target]], host: Host) -> None:
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


def _check_target(record: PatchRecord, target: Target, host: Host) -> str:
    """Refuse what cannot be patched (again); return the module of a foreign wrapper or an empty string."""
    value = target.value
    if not (callable(value) or isinstance(value, classmethod | property)):
        host.fail(record, f"it is a {type(value).__name__}, not a function, class, method or property; set it directly")
    for link in chain(value):
        if (other := attributes(link).get(MARKER)) is not None:
            host.fail(record, f"it is patched already (by record {other}); revert that first")
    if isinstance(value, type):
        _refuse_subclasses(record, value, host)
    foreign = foreign_wrapper(target, host.owns)
    if foreign and record.refuse_foreign:
        host.fail(
            record, f"{foreign} has replaced or wrapped it; switch off that feature or load this plugin without it"
        )
    return foreign


def _refuse_subclasses(record: PatchRecord, original: type, host: Host) -> None:
    """Refuse a class that has subclasses outside the host: they, and their objects, would go past the replacement."""
    if not list(_foreign_subclasses(original, host)):
        return
    gc.collect()  # a class that nobody uses any more lives on until then
    for subclass in _foreign_subclasses(original, host):
        where, name = shown_module(subclass.__module__), original.__name__
        host.fail(
            record,
            f"{where} has made class {subclass.__qualname__} from it already, which would go past the replacement; "
            f"move vtp_plugin.apply() above the line in {where} that imports {name}",
        )


def _foreign_subclasses(original: type, host: Host) -> Iterator[type]:
    """Yield the classes outside the host that are made from a class, at any distance."""
    for subclass in type.__subclasses__(original):
        if not host.owns(subclass.__module__) and not is_own(subclass.__module__):
            yield subclass
        yield from _foreign_subclasses(subclass, host)


def _build(record: PatchRecord, target: Target, host: Host) -> object:
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


def _plan(
    built: Sequence[tuple[PatchRecord, Target, str, object]], host: Host
) -> tuple[list[Patch], Sequence[tuple[int, str]]]:
    """List every assignment, the targets and their aliases, and the places that originals stay in."""
    named = named_among({id(new) for *_, new in built}, lambda module: not host.owns(module))
    for i, (record, _, _, new) in enumerate(built):
        # Otherwise revert could not tell our bindings from the ones that were there before.
        if id(new) in named or any(new is other for *_, other in built[:i]):
            host.fail(record, "its replacement is in use elsewhere; build must return a new object (wrap the old one)")
    patches = [
        Patch(record=record, target=target, new=new, foreign=foreign, slots=(_first_slot(record, target, new),))
        for record, target, foreign, new in built
    ]
    found = search(patch.swaps for patch in patches)
    of = {id(old): patch for patch in patches for old, _ in patch.swaps}
    aliases: dict[int, list[Slot]] = {id(patch): [] for patch in patches}
    for key, slot in host.slots(found.hits, {patch.slots[0].place.key for patch in patches}):
        aliases[id(of[key])].append(slot)
    patches = [replace(patch, slots=(*patch.slots, *aliases[id(patch)])) for patch in patches]
    return patches, found.unreached


def _first_slot(record: PatchRecord, target: Target, new: object) -> Slot:
    old = ABSENT if target.defined_in is not target.owner else target.value
    return Slot(where=record.target, place=Name(target.owner, target.name), old=old, new=new)


def _set_all(patches: Sequence[Patch], host: Host) -> list[tuple[int, str]]:
    """Set every slot in order; on a failure in the host restore the ones that were set.

    Returns:
        `id` of the original and the place, where another package does not let itself be changed.
    """
    done: list[Slot] = []
    refused: list[tuple[int, str]] = []
    try:
        for patch in patches:
            for slot in patch.slots:
                try:
                    slot.set()
                except Exception as error:
                    if slot.is_host:
                        host.fail(
                            patch.record, f"setting {slot.where} fails with {error!r}; choose another seam", error
                        )
                    refused.append((id(patch.target.value), slot.where))
                else:
                    done.append(slot)
    except BaseException:
        restore(done)
        raise
    return refused
