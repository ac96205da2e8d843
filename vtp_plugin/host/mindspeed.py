"""MindSpeed's adaptor: the module whose import patches Megatron for Ascend, and the right moment for our patches.

MindSpeed reads the command line and patches Megatron while its adaptor is imported (``mindspeed.megatron_adaptor``,
``mindspeed_llm.megatron_adaptor``). It needs a Megatron that nobody has imported yet, so ours must come after it.
Only :func:`import_adaptor` imports anything of MindSpeed.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

UNKNOWN_ADAPTOR: Final = "megatron_adaptor"
"""The module of MegatronAdaptor, a package below MindSpeed's branches for Megatron 0.17 and 0.18."""
UNKNOWN: Final = (
    f"{UNKNOWN_ADAPTOR} patches Megatron (MegatronAdaptor, with which MindSpeed's branches core_r0.17.0 and "
    "core_r0.18.0 begin); the plugin does not know what it replaces, and stages of unequal size may bypass that; use "
    "MindSpeed for Megatron 0.12 or 0.16 (docs/guides/ascend.md), or one size for all stages"
)
_ADAPTOR: Final = re.compile(r"mindspeed(_\w+)?(\.\w+)*\.megatron_adaptor(_v2)?")
TOO_LATE: Final = (
    "MindSpeed's adaptor is imported after vtp_plugin.apply(), which has loaded Megatron already; the order that "
    "works: import mindspeed.megatron_adaptor (or from mindspeed_llm import megatron_adaptor), vtp_plugin.apply(); or "
    "start the script with python -m vtp_plugin run"
)


def is_adaptor(module: str) -> bool:
    """Tell whether importing a module patches Megatron.

    >>> [is_adaptor(name) for name in ("mindspeed.megatron_adaptor", "mindspeed_llm.tasks.megatron_adaptor_v2")]
    [True, True]
    >>> [is_adaptor(name) for name in ("mindspeed.patch_utils", "other.megatron_adaptor")]
    [False, False]
    """
    return _ADAPTOR.fullmatch(module) is not None


def loaded_adaptor() -> str:
    """Return the name of the adaptor that this process has imported, or is importing; empty if there is none."""
    return next((name for name in tuple(sys.modules) if is_adaptor(name)), "")


def problems_of_unknown_adaptor() -> Iterator[str]:
    """Say where an adaptor has patched Megatron of which the plugin knows nothing.

    Yields:
        A line ``value; rule; way out``.
    """
    if UNKNOWN_ADAPTOR in sys.modules:
        yield UNKNOWN


def has_mindspeed() -> bool:
    """Tell whether MindSpeed can be imported."""
    return importlib.util.find_spec("mindspeed") is not None


def flags_of_mindspeed() -> tuple[str, ...]:
    """List the flags of ours that MindSpeed-LLM declares, too, for pipelines of any shape."""
    return ("--num-layer-list",) if has_mindspeed() else ()


def import_adaptor() -> str:
    """Import the adaptor, as a script of MindSpeed's does, MindSpeed-LLM's where it is installed, and return its name.

    It comes before anything of Megatron, and reads ``sys.argv``.
    """
    package = "mindspeed_llm" if importlib.util.find_spec("mindspeed_llm") is not None else "mindspeed.megatron_adaptor"
    importlib.import_module(package)
    return loaded_adaptor()


class ImportWatch(MetaPathFinder):
    """Tells when Megatron, or MindSpeed's adaptor, is imported, until it is stopped.

    ``sys.meta_path`` holds it while it watches. Python asks it for modules that are not loaded yet.

    Args:
        on_megatron: called before Megatron is imported by anybody else than MindSpeed.
        before_adaptor: called before the adaptor is imported.
        before_unknown: called before :data:`UNKNOWN_ADAPTOR` is imported.
        after_adaptor: called once it has been imported, and whatever of MindSpeed imports it.
    """

    def __init__(
        self,
        *,
        on_megatron: Callable[[], None] | None = None,
        before_adaptor: Callable[[], None] | None = None,
        before_unknown: Callable[[], None] | None = None,
        after_adaptor: Callable[[], None] | None = None,
    ) -> None:
        self._on_megatron = on_megatron
        self._before_adaptor = before_adaptor
        self._before_unknown = before_unknown
        self._after_adaptor = after_adaptor
        self._depth = 0  # modules of MindSpeed that are being imported, one in another
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Watch no longer; a second call does nothing."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Look at what is imported, and let Python's own finders find it."""
        package = fullname.partition(".")[0]
        # Libraries ask whether there is a "megatron"; who asks for a part of it will use it.
        is_used = package == "megatron" and "." in fullname and self._depth == 0
        if is_used and self._on_megatron is not None:
            self._on_megatron()
        if fullname == UNKNOWN_ADAPTOR and self._before_unknown is not None:
            self._before_unknown()
        if package != "mindspeed" and not package.startswith("mindspeed_"):
            return None
        if is_adaptor(fullname) and self._before_adaptor is not None:
            self._before_adaptor()
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and self._after_adaptor is not None:
            spec.loader = _WatchedLoader(spec.loader, self._enter, self._leave)
        return spec

    def _enter(self) -> None:
        self._depth += 1

    def _leave(self, is_executed: bool) -> None:
        self._depth -= 1
        if is_executed and self._depth == 0 and self._after_adaptor is not None and loaded_adaptor():
            self._after_adaptor()


class _WatchedLoader(Loader):
    """The loader of a module, which tells when the module is executed; all else the loader answers."""

    def __init__(self, loader: Loader, enter: Callable[[], None], leave: Callable[[bool], None]) -> None:
        self._loader = loader
        self._enter = enter
        self._leave = leave

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Make the module object as the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module."""
        is_executed = False
        self._enter()
        try:
            self._loader.exec_module(module)
            is_executed = True
        finally:
            self._leave(is_executed)
