"""A family of Megatron versions."""

from __future__ import annotations

from dataclasses import dataclass

from vtp_plugin.host.versions.ranges import is_in


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
