"""The sets of records that are applied in this process, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vtp_plugin.host.patching import AppliedPatches


class AppliedSets:
    """The sets of records that were applied, one after another; each decision between them is made once."""

    def __init__(self) -> None:
        self._sets: list[AppliedPatches] = []
        self._before_revert: list[Callable[[], None]] = []
        self._has_list = False
        self._has_bridges = False

    def __iter__(self) -> Iterator[AppliedPatches]:
        return iter(self._sets)

    def __len__(self) -> int:
        return len(self._sets)

    @property
    def has_list(self) -> bool:
        """Whether the records that depend on the command line are applied."""
        return self._has_list

    @property
    def has_bridges(self) -> bool:
        """Whether the plugin's bridges replace Megatron's."""
        return self._has_bridges

    def begin_list(self) -> bool:
        """Note that the records that depend on the command line are being applied; return False if they were before."""
        is_new, self._has_list = not self._has_list, True
        return is_new

    def begin_bridges(self) -> None:
        """Note that the plugin's bridges replace Megatron's."""
        self._has_bridges = True

    def add(self, applied: AppliedPatches) -> None:
        """Add a set that was applied."""
        self._sets.append(applied)

    def before_revert(self, call: Callable[[], None]) -> None:
        """Let a function be called before the sets are undone."""
        self._before_revert.append(call)

    def revert(self) -> None:
        """Undo all sets, the last one first."""
        for call in self._before_revert:
            call()
        for applied in reversed(self._sets):
            applied.revert()
