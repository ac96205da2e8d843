"""Errors about files that may run code when they are read."""

from __future__ import annotations

import re

from vtp_plugin.errors import ConfigError


class UntrustedError(ConfigError):
    """A file of a checkpoint names what only somebody who means harm would put there."""


def names_more(archive: str, name: str) -> UntrustedError:
    """Make the error that an archive names something that torch does not consider safe.

    Args:
        archive: the archive's name in the error.
        name: name of the function or class.
    """
    return UntrustedError(
        f"{archive} names {name}, which torch does not take for harmless; it may run anything, so nothing is read; "
        "take a checkpoint whose origin you know, or allow what you trust with torch.serialization.add_safe_globals"
    )


def is_unknown(archive: str, error: Exception) -> UntrustedError:
    """Make the error that nobody can tell what an archive names.

    Args:
        archive: the archive's name in the error.
        error: the error of torch's reader.
    """
    reason = ascii(str(error))[1:100]
    return UntrustedError(
        f"{archive} is not what torch.save writes ({reason}), so nobody can tell what it names; nothing is read; "
        "copy it again, or take a checkpoint whose origin you know"
    )


def refused(archive: str, error: Exception) -> UntrustedError:
    """Make the error for an object that torch has refused to make.

    >>> str(refused("a.pt", ValueError("Unsupported global: GLOBAL posix.system was not"))).partition(",")[0]
    'a.pt names posix.system'
    """
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return names_more(archive, found.group(1)) if found else is_unknown(archive, error)
