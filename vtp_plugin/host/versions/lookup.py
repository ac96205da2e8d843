"""The family of a version, and what was run with it."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions.capability import Capability
from vtp_plugin.host.versions.known_versions import CAPABILITIES, FACTS, HOSTS
from vtp_plugin.host.versions.megatron_family import MegatronFamily


def host_named(name: str) -> MegatronFamily:
    """Return the family of that name.

    Raises:
        PatchError: There is none.

    >>> host_named("0.16").versions
    '>=0.15,<0.17'
    """
    for host in HOSTS:
        if host.name == name:
            return host
    raise PatchError(f"Megatron version {name!r}; known are {', '.join(host.name for host in HOSTS)}; use one of them")


def family_of(version: str) -> MegatronFamily | None:
    """Return the family that a version belongs to, if it is known.

    >>> [host.name for version in ("0.12.3", "0.15.3", "0.13") if (host := family_of(version))]
    ['0.12', '0.16']
    """
    return next((host for host in HOSTS if host.has(version)), None)


def capability(name: str) -> Capability:
    """Return the row of that name.

    Raises:
        KeyError: there is none.

    >>> capability("two_rings").has("0.19.2"), capability("two_rings").missing
    (True, ('<0.19', '>=0.20'))
    """
    return {row.name: row for row in (*CAPABILITIES, *FACTS)}[name]


def lacking(row: Capability, host: MegatronFamily) -> tuple[str, ...]:
    """Return the first versions of a family that lack a capability, each the oldest of those that follow it.

    >>> lacking(capability("whole_grids"), host_named("0.12")), lacking(capability("whole_grids"), host_named("0.19"))
    (('0.12.3',), ())
    """
    changes = [clause[2:] for ranges in row.missing for clause in ranges.split(",") if clause.startswith(">=")]
    inside = [host.first, *(version for version in changes if host.has(version) and version != host.first)]
    return tuple(version for version in sorted(inside, key=Version) if not row.has(version))


def is_run_with(row: Capability, host: MegatronFamily) -> bool:
    """Tell whether any version of a family has a capability.

    >>> [is_run_with(capability("whole_grids"), host_named(name)) for name in ("0.16", "0.17")]
    [True, False]
    """
    starts = [clause[2:] for ranges in row.versions for clause in ranges.split(",") if clause.startswith(">=")]
    return any(row.has(version) for version in (host.first, *starts) if host.has(version))


def untried(host: MegatronFamily) -> str:
    """Say what was not run with a family yet; ``apply()`` warns of it. Empty where the whole test suite runs.

    >>> [untried(host_named(name)) for name in ("0.16", "0.18", "0.19")]
    ['Megatron 0.15 beyond the core grids, and --sft', '--sft, hangs, and the whole grids of options', '']
    """
    parts = [*_untried_in_part(host)]
    parts += [
        row.untried
        for row in CAPABILITIES
        if row.untried and not is_run_with(row, host) and not row.is_absent(host.first)
    ]
    *others, last = parts or [""]
    return f"{', '.join(others)}, and {last}" if others else last


def _untried_in_part(host: MegatronFamily) -> Iterator[str]:
    for row in CAPABILITIES:
        if row.untried_in_part and is_run_with(row, host):
            yield from (f"Megatron {version} {row.untried_in_part}" for version in lacking(row, host)[:1])
