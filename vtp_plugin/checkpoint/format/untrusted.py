"""What is said of a file that may run something when it is read."""

from __future__ import annotations

import re

from vtp_plugin.errors import ConfigError


class UntrustedError(ConfigError):
    """A file of a checkpoint names what only somebody who means harm would put there."""


def names_more(said: str, name: str) -> UntrustedError:
    """Say that an archive names what torch does not take for harmless.

    Args:
        said: what the archive is called.
        name: of a function or class.
    """
    return UntrustedError(
        f"{said} names {name}, which torch does not take for harmless; it may run anything, so nothing is read; take a "
        "checkpoint whose origin you know, or allow what you trust with torch.serialization.add_safe_globals"
    )


def is_unknown(said: str, error: Exception) -> UntrustedError:
    """Say that nobody can tell what an archive names.

    Args:
        said: what the archive is called.
        error: of torch's reader.
    """
    told = ascii(str(error))[1:100]
    return UntrustedError(
        f"{said} is not what torch.save writes ({told}), so nobody can tell what it names; nothing is read; copy it "
        "again, or take a checkpoint whose origin you know"
    )


def refused(said: str, error: Exception) -> UntrustedError:
    """Say in a line what torch has refused to make.

    >>> str(refused("a.pt", ValueError("Unsupported global: GLOBAL posix.system was not"))).partition(",")[0]
    'a.pt names posix.system'
    """
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    return names_more(said, found.group(1)) if found else is_unknown(said, error)
