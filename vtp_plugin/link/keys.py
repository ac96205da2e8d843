"""Make the keys of a site; ``wg`` makes them, and no private or pre-shared one is printed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from vtp_plugin.errors import ConfigError
from vtp_plugin.link.run_commands import require_private
from vtp_plugin.link.site_file import LinkSite


def make_keys(site: LinkSite, *, is_first: bool) -> list[str]:
    """Make the keys that are missing.

    Args:
        site: names their files.
        is_first: make the pre-shared key, too; the other machines get a copy.

    Returns:
        Lines that say what to give to the other machines; the public key is in the first.

    Raises:
        ConfigError: a file cannot be written or may be read by others, or ``wg`` is missing.
    """
    if not site.private_key.exists():
        _write(site.private_key, _wg(("genkey",)))
    require_private(site.private_key, way_out="choose another file")
    public = _wg(("pubkey",), stdin=site.private_key.read_bytes()).decode().strip()
    lines = [f"public key of {site.name}: {public}", "the other machines need it as public_key of their [[peer]]"]
    if site.pre_shared_key.exists():
        require_private(site.pre_shared_key, way_out="choose another file")
    elif is_first:
        _write(site.pre_shared_key, _wg(("genpsk",)))
        lines.append(f"new pre-shared key in {site.pre_shared_key}: copy it to them by a way that nobody else reads")
    else:
        lines.append(
            f"the pre-shared key {site.pre_shared_key} is missing: copy it from the other site, or, on one side alone, "
            "make it with --pre-shared"
        )
    return lines


def _wg(words: Sequence[str], stdin: bytes = b"") -> bytes:
    try:
        return subprocess.run(("wg", *words), input=stdin, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise ConfigError("wg is not installed; it makes the keys; install wireguard-tools") from None
    except subprocess.CalledProcessError as error:
        why = " ".join(error.stderr.decode(errors="replace").split())
        raise ConfigError(f"wg {words[0]} failed: {why}; a key file may hold something else; move it away") from None


def _write(path: Path, key: bytes) -> None:
    """Write a key into a new file, which from its first moment on only its owner can read."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; a key needs a file of its own; choose another folder"
        ) from None
