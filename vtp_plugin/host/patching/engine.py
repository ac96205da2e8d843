"""Carry out patch records: resolve and check everything, build everything, then set all or none.

The order of the steps makes it safe. Nothing of the host changes before every target is found and checked, and every
replacement is built. From then on every change is an entry of one undo stack.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable, Iterator, Sequence
from types import MethodType
from typing import Any

from vtp_plugin.host.patching.applied_patches import AppliedPatches, Patch, PatchedPackage, parts
from vtp_plugin.host.patching.names import count_references, is_own, shown_module
from vtp_plugin.host.patching.objects import MARKER, attributes, chain, foreign_wrapper, functions, wrong_kind
from vtp_plugin.host.patching.record import PatchRecord, Record, Target, WriteRecord, resolve_target


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
    found = [(record, _lookup(record, host)) for record in records if id(record) not in skipped]
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


def _lookup(record: Record, host: PatchedPackage) -> Target:
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
