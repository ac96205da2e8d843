"""The Megatron that a run uses, the *host*: which versions are known, which one is imported, what was run with which.

``known_versions`` is all that a new version changes here. ``find`` reads the version of what an import takes.

Words:
    host: the Megatron that a run uses, and the family that it belongs to (``MegatronFamily``).
    family: versions of Megatron that the same patches carry.
    range: versions of a package, such as ``>=0.19,<0.20``.
    capability: something that was run with some versions, by a name that patches, checks and tests ask for.
"""

from __future__ import annotations

from vtp_plugin.host.versions.find import Package, find_host, find_megatron, find_torch, problems_of
from vtp_plugin.host.versions.known_versions import (
    HOSTS,
    SUPPORTED,
    Capability,
    MegatronFamily,
    capability,
    check_range,
    family_of,
    host_named,
    is_in,
    untried,
)

__all__ = [
    "HOSTS",
    "SUPPORTED",
    "Capability",
    "MegatronFamily",
    "Package",
    "capability",
    "check_range",
    "family_of",
    "find_host",
    "find_megatron",
    "find_torch",
    "host_named",
    "is_in",
    "problems_of",
    "untried",
]
