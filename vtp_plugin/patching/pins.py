"""Pins: digests of what the records replace, so that a silently changed host is seen.

A pin file is TOML with one table per host version and one line per target::

    ["0.19.2"]
    "megatron.core.parallel_state:initialize_model_parallel" = "9f86d0..."

Pin files are generated. A mismatch inside a record's version range is a reason to look, not an error.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from vtp_plugin.errors import PatchError
from vtp_plugin.patching.record import PatchRecord, resolve_target

_HEADER = "# Generated: digests of the objects that the patch records replace, per host version.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PinMismatch:
    """A target that is not what its pin says.

    Attributes:
        id: Id of the record.
        target: Target of the record.
        expected: The pinned digest; empty when there is no pin for this version.
        found: The digest of what is installed; empty when the target or its source cannot be read.
        reason: One line for a person.
    """

    id: str
    target: str
    expected: str
    found: str
    reason: str


def pin_of(obj: Any) -> str:
    """Digest the source text and the parameters of a function, class or descriptor.

    Trailing blanks, blank lines and the depth of the whole definition do not count; everything else in the text does,
    comments too. A wrapper that keeps `__wrapped__` has the digest of what it wraps, so a patched target keeps its pin.

    Returns:
        64 hexadecimal digits (SHA-256).

    Raises:
        PatchError: The object has no Python source.

    >>> len(pin_of(textwrap.dedent)), pin_of(textwrap.dedent) == pin_of(textwrap.indent)
    (64, False)
    """
    if isinstance(obj, property):
        parts = [f"{kind} {pin_of(f)}" for kind, f in (("get", obj.fget), ("set", obj.fset), ("del", obj.fdel)) if f]
        return _digest("\n".join(parts))
    if isinstance(obj, staticmethod | classmethod):
        return pin_of(obj.__func__)
    try:
        source = inspect.getsource(obj)
    except (OSError, TypeError) as error:
        raise PatchError(f"{obj!r} has no Python source to pin; leave its record without a pin") from error
    lines = (line.rstrip() for line in textwrap.dedent(source.expandtabs()).splitlines())
    return _digest("\n".join([_parameters(obj), *(line for line in lines if line)]))


def pins_of(records: Iterable[PatchRecord], version: str) -> dict[str, str]:
    """Digest the targets of the records that fit the version, as installed, for :func:`write_pins`.

    Returns:
        Target -> digest. Optional records whose module is absent are left out.

    Raises:
        PatchError: A target cannot be found or has no source.
    """
    pins: dict[str, str] = {}
    for record in records:
        if not record.fits(version):
            continue
        found, reason = _installed(record)
        if found:
            pins[record.target] = found
        elif reason:
            raise PatchError(f"patch {record.id} on {record.target} ({version}): {reason}")
    return pins


def compare(
    records: Iterable[PatchRecord], pins: Mapping[str, Mapping[str, str]], version: str
) -> tuple[PinMismatch, ...]:
    """Compare the installed targets of the records that fit the version with the pins of exactly this version.

    Args:
        records: The records; those that do not fit the version, and optional ones whose module is absent, are skipped.
        pins: Host version -> target -> digest, as from :func:`read_pins`.
        version: Version of the installed host.

    Returns:
        One entry per record that differs, has no pin or cannot be read, in the order of the records.
    """
    mismatches: list[PinMismatch] = []
    for record in records:
        if not record.fits(version):
            continue
        expected = pins.get(version, {}).get(record.target, "")
        found, reason = _installed(record)
        if (found and found == expected) or not (found or reason):
            continue
        if found:
            reason = f"its source differs from the pinned one of {version}" if expected else f"no pin for {version}"
        mismatches.append(
            PinMismatch(id=record.id, target=record.target, expected=expected, found=found, reason=reason)
        )
    return tuple(mismatches)


def read_pins(path: Path) -> dict[str, dict[str, str]]:
    """Read a pin file: host version -> target -> digest.

    Raises:
        PatchError: The file is not a pin file.
        OSError: The file cannot be read.
    """
    try:
        pins = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PatchError(f"{path} is not valid TOML ({error}); generate the pins again") from error
    for version, table in pins.items():
        if not (isinstance(table, dict) and all(isinstance(digest, str) for digest in table.values())):
            raise PatchError(f"{path}: {version!r} is not a table of digests; generate the pins again")
    return pins


def write_pins(path: Path, pins: Mapping[str, Mapping[str, str]]) -> None:
    """Write a pin file, sorted, so that generating it again from the same host gives the same bytes."""
    tables = [_table(version, pins[version]) for version in sorted(pins)]
    path.write_text(_HEADER + "".join(tables), encoding="utf-8")


def _table(version: str, digests: Mapping[str, str]) -> str:
    # Quoted keys, since dots would nest; versions, targets and digests hold no character that needs an escape.
    if any(char in text for text in (version, *digests, *digests.values()) for char in '"\\\n'):
        raise PatchError(f"pins of {version}: a name or digest has a character that needs an escape; write it by hand")
    lines = [f'"{target}" = "{digests[target]}"\n' for target in sorted(digests)]
    return f'\n["{version}"]\n' + "".join(lines)


def _installed(record: PatchRecord) -> tuple[str, str]:
    """Return the digest of the installed target and "", or "" and what prevents it; twice "" for an absent module."""
    try:
        return pin_of(resolve_target(record.target).value), ""
    except PatchError as error:
        return "", str(error)
    except Exception as error:  # whatever importing a host module raises
        return "", "" if record.may_miss(error) else f"cannot be read: {error!r}"


def _parameters(obj: Any) -> str:
    """Return names and kinds of the parameters; defaults are in the source, and their repr may hold an address."""
    try:
        parameters = inspect.signature(obj).parameters.values()
    except (TypeError, ValueError):
        return ""
    return ", ".join(f"{p.name}:{p.kind.name}{'' if p.default is p.empty else '='}" for p in parameters)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
