"""The Megatron that an import takes, and whether a run can use it.

The version is Megatron's own (``megatron.core.package_info``), of the tree that an import finds: a Megatron that lies
beside the script is no installed distribution, and may hide one that is.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import VERSION_PATTERN, Version

from vtp_plugin.errors import PatchError
from vtp_plugin.host.versions.known_versions import HOSTS, MegatronFamily, family_of

_OLDEST_TORCH = "2.6"
_TORCH_WAY_OUT = "run: pip install 'torch>=2.6,<3' (for an NPU, the version that your torch_npu names)"
_BESIDE = "or put such a Megatron-LM tree beside the script"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that can be imported.

    Attributes:
        version: Its public version, without the mark of a commit: ``0.19.2`` of ``0.19.2+1a2b3c``.
        folder: Where it lies.
    """

    version: str
    folder: Path


def find_megatron() -> Package | None:
    """Find the Megatron that is imported, or that an import would take; nothing of it is imported here.

    Returns:
        None where ``megatron.core`` cannot be found.

    Raises:
        PatchError: It does not say its version.
    """
    return _find("megatron.core", "package_info.py")


def find_torch() -> Package | None:
    """Find torch in the same way.

    Raises:
        PatchError: It does not say its version.
    """
    return _find("torch", "version.py")


def find_host() -> tuple[MegatronFamily, Package]:
    """Find the Megatron that an import takes, and its family.

    Raises:
        PatchError: There is no torch or no Megatron, or none that the plugin runs with.
    """
    megatron = find_megatron()
    if text := " | ".join(problems_of(find_torch(), megatron)):
        raise PatchError(text)
    assert megatron is not None
    host = family_of(megatron.version)
    assert host is not None
    return host, megatron


def problems_of(
    torch: Package | None, megatron: Package | None, python: Sequence[int] = sys.version_info[:2]
) -> Iterator[str]:
    """Say why a run cannot use what was found; nothing if it can.

    Args:
        torch: The torch that was found.
        megatron: The Megatron that was found.
        python: The running version, for the advice on what to install.

    >>> here = Path("/lib/megatron/core")
    >>> list(problems_of(Package("2.7.1", here), Package("0.19.2", here)))
    []
    >>> next(problems_of(Package("2.7.1", here), Package("0.13.0", here), python=(3, 12))).partition(";")[0]
    'megatron-core 0.13.0 at /lib/megatron/core is not supported'
    """
    if torch is None:
        yield f"torch is missing; {_TORCH_WAY_OUT}"
    elif Version(torch.version) < Version(_OLDEST_TORCH):
        yield f"torch {torch.version} at {torch.folder}; vtp_plugin needs {_OLDEST_TORCH} or newer; {_TORCH_WAY_OUT}"
    if megatron is None:
        yield f"Megatron is missing: there is no megatron.core; {_way_out(python)}"
        return
    if family_of(megatron.version) is None:
        yield (
            f"megatron-core {megatron.version} at {megatron.folder} is not supported; this version of vtp_plugin runs "
            f"with {' and '.join(host.versions for host in HOSTS)}; {_way_out(python)}"
        )


def _way_out(python: Sequence[int]) -> str:
    """Say how to get a Megatron that runs: best in this Python, else in one that fits.

    >>> _way_out((3, 12))
    "run: pip install 'megatron-core>=0.19,<0.20', or put such a Megatron-LM tree beside the script"
    >>> _way_out((3, 10)).partition(",")[0]
    "run: pip install 'megatron-core>=0.15"
    """
    newest, running = HOSTS[-1], f"{python[0]}.{python[1]}"
    fitting = next((host for host in HOSTS[::-1] if running in host.pythons), None)
    if fitting is not None:
        return f"run: {fitting.install}, {_BESIDE}"
    return f"run: {newest.install} (in Python {' or '.join(newest.pythons)}, this is {running}), {_BESIDE}"


def _find(name: str, file_name: str) -> Package | None:
    """Find a package, and read its version from a file of its own; None where there is no such package."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # nor the one above it
        return None
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec is not None else ())]
    for file in (folder / file_name for folder in folders):
        if file.is_file():
            return Package(_public(name, _read_version(file)), file.parent)
    if folders:
        raise PatchError(f"{name} at {folders[0]} has no {file_name}, which says its version; install a released one")
    return None


def _read_version(file: Path) -> object:
    """Return the version that a file says; it imports nothing of the package."""
    spec = importlib.util.spec_from_file_location("_version_of_package", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, "__version__", None)


def _public(name: str, version: object) -> str:
    """Return the part of a version that says what is in it; what a fork has put behind it is left out, too.

    >>> _public("megatron.core", "0.19.2+1a2b3c"), _public("megatron.core", "0.19.2-ours")
    ('0.19.2', '0.19.2')
    """
    found = re.match(VERSION_PATTERN, str(version), re.VERBOSE | re.IGNORECASE)
    if found is None:
        raise PatchError(f"{name} says that its version is {version!r}, which is none; install a released one")
    return found[0].partition("+")[0]
