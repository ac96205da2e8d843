"""Families of Megatron's versions, and what each can do.

The families of Megatron versions, and what was run with which: data, and nothing else.

A new version has a row in ``HOSTS``. It has no capability until that was run with it; then that row says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from vtp_plugin.errors import PatchError

_CLAUSE = re.compile(r"(?:>=|<)\d+(?:\.\d+)*", re.ASCII)


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
    try:
        found = Version(version)
    except InvalidVersion:
        raise ValueError(f"{version!r} is not a PEP 440 version") from None
    return any(SpecifierSet(versions).contains(found, prereleases=True) for versions in ranges)


def between(ranges: tuple[str, ...]) -> tuple[str, ...]:
    """Return the ranges that lie before, between and after some, which are in their order.

    >>> between(("<0.17", ">=0.19,<0.20")), between((">=0.12.1,<0.12.3",)), between((">=0.15",))
    (('>=0.17,<0.19', '>=0.20'), ('<0.12.1', '>=0.12.3'), ('<0.15',))
    """
    return tuple(_between(ranges))


def _between(ranges: tuple[str, ...]) -> Iterator[str]:
    end = ""
    for versions in ranges:
        first = next((clause[2:] for clause in versions.split(",") if clause.startswith(">=")), "")
        below = next((clause[1:] for clause in versions.split(",") if clause.startswith("<")), "")
        if first and first != end:
            yield f">={end},<{first}" if end else f"<{first}"
        end = below
    if end:
        yield f">={end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Something that works with some versions of Megatron and was not run, or does not work, with others.

    Attributes:
        name: Name by which code asks for it, such as ``"two_rings"``.
        what: Description in a few words.
        versions: The ranges of versions with which it was run, in their order, each with an end: what a newer Megatron
            does with it is not known. A fact of Megatron that needs no run may be true from a version on.
        shown_by: The test that shows it, or the command.
        absent: The ranges of versions that have no such thing, so that there is nothing to run.
        notes: Remarks about some versions, by ranges.
        untried: Name in the warning of ``apply()`` where no version of a family ran it; empty for no warning, as where
            the run stops.
        untried_in_part: Name in the warning where only some versions of a family ran it, after the first that did not.

    Raises:
        ValueError: a range is malformed.
    """

    name: str
    what: str
    versions: tuple[str, ...]
    shown_by: str
    absent: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    untried: str = ""
    untried_in_part: str = ""

    def __post_init__(self) -> None:
        for versions in (*self.versions, *self.absent, *self.notes):
            check_range(versions)

    def has(self, version: str) -> bool:
        """Tell whether a version has it."""
        return is_in(version, *self.versions)

    def is_absent(self, version: str) -> bool:
        """Tell whether a version has no such thing that could be run."""
        return is_in(version, *self.absent)

    @property
    def missing(self) -> tuple[str, ...]:
        """The ranges of versions that do not have it."""
        return between(self.versions)

    def said_of(self, version: str) -> str:
        """Say what was done with it where a version lacks it: ``not in it``, ``not run``, or ``not supported``."""
        return "not in it" if self.is_absent(version) else self.note(version) or "not run"

    def note(self, version: str) -> str:
        """Return what else is to say of it with a version; empty if nothing."""
        return next((text for versions, text in self.notes.items() if is_in(version, versions)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronFamily:
    """A family of Megatron versions that the same patches carry.

    Attributes:
        name: Name of the family, such as ``0.12`` in ``make env HOST=0.12`` and in the extra ``host-0.12``.
        first: The oldest version.
        below: The versions end before this one.
        pythons: Versions of Python that ``make env`` looks for, best first; megatron-core has a wheel for each.
        torch: What ``make env`` installs, as a specifier.
        needs_all: Megatron imports what its metadata asks for; else ``pip install --no-deps`` installs it.
    """

    name: str
    first: str
    below: str
    pythons: tuple[str, ...]
    torch: str
    needs_all: bool = True

    @property
    def versions(self) -> str:
        """The versions as a PEP 440 specifier.

        >>> MegatronFamily(name="0.12", first="0.12.1", below="0.13", pythons=(), torch="").versions
        '>=0.12.1,<0.13'
        """
        return f">={self.first},<{self.below}"

    @property
    def install(self) -> str:
        """The command that installs a Megatron of this family.

        >>> MegatronFamily(name="0.19", first="0.19", below="0.20", pythons=(), torch="").install
        "pip install 'megatron-core>=0.19,<0.20'"
        """
        return f"pip install {'' if self.needs_all else '--no-deps '}'megatron-core{self.versions}'"

    def has(self, version: str) -> bool:
        """Tell whether a version belongs to the family; of pre-releases, those of `first` and `below` do not.

        >>> host = MegatronFamily(name="0.19", first="0.19", below="0.20", pythons=(), torch="")
        >>> [host.has(version) for version in ("0.19.2", "0.19.0rc1", "0.19.1rc1", "0.20.0rc0", "0.2")]
        [True, False, True, False, False]
        """
        return is_in(version, self.versions)


HOSTS = (
    MegatronFamily(
        name="0.12",
        first="0.12.1",
        below="0.13",
        pythons=("3.10", "3.11"),
        torch="==2.7.1",
        needs_all=False,
    ),
    MegatronFamily(name="0.16", first="0.15", below="0.17", pythons=("3.11", "3.10", "3.12"), torch=">=2.6,<2.7"),
    MegatronFamily(name="0.17", first="0.17", below="0.18", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
    MegatronFamily(name="0.18", first="0.18", below="0.19", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
    MegatronFamily(name="0.19", first="0.19", below="0.20", pythons=("3.12", "3.13"), torch=">=2.6,<3"),
)
SUPPORTED = f">={HOSTS[0].first},<{HOSTS[-1].below}"
"""From the oldest version that is carried to the newest; not all between them are."""

_GRIDS = ("<0.17", ">=0.19,<0.20")
_NEWEST = (">=0.19,<0.20",)
_ALL = ("<0.20",)

CAPABILITIES = (
    Capability(
        name="core_grids",
        what="trains as the uniform run: the core grids",
        versions=_ALL,
        shown_by="tests/multiproc/layouts/test_host_grid.py",
    ),
    Capability(
        name="prediction",
        what="multi-token prediction",
        versions=_ALL,
        shown_by="tests/multiproc/training/test_mtp.py",
    ),
    Capability(
        name="scripts",
        what="a script on `megatron.training` trains",
        versions=("<0.17", ">=0.18,<0.20"),
        shown_by="tests/multiproc/training/test_training.py",
        notes={"<0.17": "NVIDIA's", ">=0.18,<0.19": "NVIDIA's"},
    ),
    Capability(
        name="fine_tuning",
        what="fine-tuning on packed samples (`--sft`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/training/test_packed_training.py",
        absent=("<0.13",),
        notes={">=0.15,<0.17": "it ends in Megatron itself"},
        untried="--sft",
    ),
    Capability(
        name="hangs",
        what="ends when a rank hangs",
        versions=_GRIDS,
        shown_by="tests/hang/test_hangs.py",
        untried="hangs",
    ),
    Capability(
        name="whole_grids",
        what="the whole grids: schedules, options, saves, resumes, rejects wrong input",
        versions=("<0.12.3", ">=0.16,<0.17", ">=0.19,<0.20"),
        shown_by="make test-full",
        notes={"<0.17": "a part of `test_parity.py` only"},
        untried="the whole grids of options",
        untried_in_part="beyond the core grids",
    ),
    Capability(
        name="experts",
        what="experts per stage",
        versions=_GRIDS,
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={">=0.17,<0.19": "not supported"},
    ),
    Capability(
        name="router_losses_per_token",
        what="its routers' losses with `--calculate-per-token-loss`",
        versions=_NEWEST,
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="router_losses_over_contexts",
        what="its routers' losses where CP sizes differ, too",
        versions=(">=0.15,<0.17", ">=0.19,<0.20"),
        shown_by="tests/multiproc/experts/test_experts.py",
        notes={"<0.13": "not supported", ">=0.17,<0.19": "not supported"},
    ),
    Capability(
        name="latent_attention",
        what="latent attention",
        versions=_NEWEST,
        shown_by="tests/multiproc/training/test_attention.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="layouts",
        what="`--pipeline-model-parallel-layout`",
        versions=(">=0.15",),
        shown_by="tests/multiproc/training/test_mtp.py",
        absent=("<0.15",),
    ),
    Capability(
        name="two_rings",
        what="an encoder in a U (`--vtp-encoder-layer-list`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/u_shape/test_pictures.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="adapters",
        what="adapters, LoRA (`--vtp-lora-rank`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/training/test_lora.py",
        notes={"<0.19": "not supported"},
    ),
    Capability(
        name="bridges",
        what="bridges between modules (`--vtp-bridges`)",
        versions=_NEWEST,
        shown_by="tests/multiproc/bridges/test_bridges.py",
        absent=("<0.19",),
    ),
)
"""What was run with which versions, in the order of the README's table."""

FACTS = (
    Capability(
        name="named_aliases",
        what="records name, beside their targets, the places that hold these by a from-import",
        versions=_NEWEST,
        shown_by="tests/unit/session/test_apply.py",
    ),
    Capability(
        name="ramp_up",
        what="`--rampup-batch-size` makes batches grow",
        versions=("<0.18",),
        shown_by="tests/multiproc/training/test_growing_batches.py::test_batches_that_grow",
        notes={">=0.18": "ignored"},
    ),
    Capability(
        name="worker_without_cuda",
        what="the worker that saves in the background calls no CUDA",
        versions=(">=0.19",),
        shown_by="tests/unit/host/test_host_seam.py::test_the_worker_that_saves_is_refused_on_cpus",
    ),
    Capability(
        name="saves_by_site",
        what="saves and loads of `torch_dist` were made to take the ranks of one site for all",
        versions=_NEWEST,
        shown_by="tests/multiproc/sites/test_parts.py",
    ),
    Capability(
        name="loss_summed_over_replicas",
        what="the loss function of its scripts sums every microbatch over the replicas of the stage",
        versions=("<0.13",),
        shown_by="tests/multiproc/layouts/test_joint_replicas.py",
    ),
)
"""What patches ask besides."""


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
