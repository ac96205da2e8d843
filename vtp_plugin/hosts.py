"""The Megatron that a run uses, the *host*: which versions are known, which one is imported, which one runs.

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

from vtp_plugin.errors import PatchError

_VERSION = re.compile(r"(?P<release>\d+(?:\.\d+)*)[._-]?(?P<pre>a|b|rc|dev)?")
_CLAUSE = re.compile(r"(?P<bound>>=|<)(?P<version>\d+(?:\.\d+)*)", re.ASCII)
_OLDEST_TORCH = "2.6"
_TORCH_WAY_OUT = "run: pip install 'torch>=2.6,<3' (for an NPU, the version that your torch_npu names)"
_BESIDE = "or put such a Megatron-LM tree beside the script"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A family of Megatron versions that the same patches carry.

    Attributes:
        name: As in ``make env HOST=0.12`` and in the extra ``host-0.12``.
        first: The oldest version.
        below: The versions end before this one.
        pythons: Versions of Python that ``make env`` looks for, best first; megatron-core has a wheel for each.
        torch: What ``make env`` installs, as a specifier.
        untried: What has not been run with it yet; ``apply()`` warns of it. Empty where the whole test suite runs.
        needs_all: Megatron imports what its metadata asks for; else ``pip install --no-deps`` installs it.
    """

    name: str
    first: str
    below: str
    pythons: tuple[str, ...]
    torch: str
    untried: str = ""
    needs_all: bool = True

    @property
    def versions(self) -> str:
        """The versions as a PEP 440 specifier.

        >>> host_named("0.12").versions
        '>=0.12.1,<0.13'
        """
        return f">={self.first},<{self.below}"

    @property
    def install(self) -> str:
        """The command that installs a Megatron of this family.

        >>> host_named("0.19").install
        "pip install 'megatron-core>=0.19,<0.20'"
        """
        return f"pip install {'' if self.needs_all else '--no-deps '}'megatron-core{self.versions}'"

    def has(self, version: str) -> bool:
        """Tell whether a version belongs to the family; of pre-releases, those of `first` and `below` do not.

        >>> [host_named("0.19").has(version) for version in ("0.19.2", "0.19.0rc1", "0.19.1rc1", "0.20.0rc0", "0.2")]
        [True, False, True, False, False]
        """
        return is_in(version, self.versions)


def check_range(versions: str) -> None:
    """Refuse what is no range of versions: clauses with ``>=`` or ``<``, joined by commas.

    Raises:
        ValueError: it is none.
    """
    for clause in versions.split(","):
        if not _CLAUSE.fullmatch(clause):
            raise ValueError(f"{versions!r} is not a version range; write it like '>=0.19,<0.20'")


def is_in(version: str, *ranges: str) -> bool:
    """Tell whether a version lies in one of some ranges; of pre-releases, those of a range's ends do not.

    Raises:
        ValueError: it is no version.

    >>> [is_in(version, "<0.17", ">=0.18,<0.19") for version in ("0.16.1", "0.17.0", "0.18.0", "0.19.2")]
    [True, False, True, False]
    """
    return any(all(_meets(version, clause) for clause in versions.split(",")) for versions in ranges)


def _meets(version: str, clause: str) -> bool:
    bound = clause.lstrip("<>=")
    return _key(version) >= _key(bound) if clause.startswith(">=") else _key(version)[0] < _key(bound)[0]


HOSTS = (
    Host(
        name="0.12",
        first="0.12.1",
        below="0.13",
        pythons=("3.10", "3.11"),
        torch="==2.7.1",
        untried="Megatron 0.12.3 beyond the core grids",
        needs_all=False,
    ),
    Host(
        name="0.16",
        first="0.15",
        below="0.17",
        pythons=("3.11", "3.10", "3.12"),
        torch=">=2.6,<2.7",
        untried="Megatron 0.15 beyond the core grids, and --sft",
    ),
    Host(
        name="0.17",
        first="0.17",
        below="0.18",
        pythons=("3.12", "3.13"),
        torch=">=2.6,<3",
        untried="--sft, hangs, and the whole grids of options",
    ),
    Host(
        name="0.18",
        first="0.18",
        below="0.19",
        pythons=("3.12", "3.13"),
        torch=">=2.6,<3",
        untried="--sft, hangs, and the whole grids of options",
    ),
    Host(name="0.19", first="0.19", below="0.20", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
)
SUPPORTED = f">={HOSTS[0].first},<{HOSTS[-1].below}"
"""From the oldest version that is carried to the newest; not all between them are."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package that can be imported.

    Attributes:
        version: Its public version, without the mark of a commit: ``0.19.2`` of ``0.19.2+1a2b3c``.
        folder: Where it lies.
    """

    version: str
    folder: Path


def host_named(name: str) -> Host:
    """Return the family of that name.

    Raises:
        PatchError: There is none.

    >>> host_named("0.16").versions
    '>=0.15,<0.17'
    """
    for host in HOSTS:
        if host.name == name:
            return host
    raise PatchError(f"host {name!r}; hosts are {', '.join(host.name for host in HOSTS)}; choose one of them")


def family_of(version: str) -> Host | None:
    """Return the family that a version belongs to, if it is known.

    >>> [host.name for version in ("0.12.3", "0.15.3", "0.13") if (host := family_of(version))]
    ['0.12', '0.16']
    """
    return next((host for host in HOSTS if host.has(version)), None)


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


def find_host() -> tuple[Host, Package]:
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
    elif _key(torch.version) < _key(_OLDEST_TORCH):
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
    """Return the part of a version that says what is in it.

    >>> _public("megatron.core", "0.19.2+1a2b3c")
    '0.19.2'
    """
    text = str(version).partition("+")[0]
    if _VERSION.match(text) is None:
        raise PatchError(f"{name} says that its version is {version!r}, which is none; install a released one")
    return text


def _key(version: str) -> tuple[tuple[int, ...], bool]:
    """Order versions: numbers without closing zeros, then whether it is a release rather than something before it."""
    match = _VERSION.match(version)
    if match is None:
        raise ValueError(f"{version!r} is not a PEP 440 version")
    numbers = [int(number) for number in match["release"].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), match["pre"] is None
