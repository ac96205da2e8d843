"""Modules in the place of the Ascend implementation's, so that its import lines give the plugin's functions."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType
from typing import Any, Final

from vtp_plugin.api import installed_modules
from vtp_plugin.errors import ConfigError
from vtp_plugin.functional import handles, p2p
from vtp_plugin.util.undo import Item, Name, UndoStack

_MODULES: Final = {"p2p_communication_patch": p2p, "parallel_state_patch": handles}


class _StandIn(ModuleType):
    """A module with our names, then those of the module that it stands for.

    What is assigned to one of our names is assigned in our module, where our functions look it up: tests put mocks
    there.
    """

    def __init__(self, name: str, ours: ModuleType, real: ModuleType | None) -> None:
        super().__init__(name, real.__doc__ if real is not None else ours.__doc__)
        # Not where our module comes from, such as __file__: Python tells modules apart by it.
        own = frozenset(name for name in dir(ours) if name == "__all__" or not name.startswith("__"))
        vars(self).update(__spec__=ModuleSpec(name, None), _ours=ours, _real=real, _own=own)

    def __getattr__(self, name: str) -> Any:
        if (holder := self._holder(name)) is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(holder, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._holder(name), name, value) if self._holder(name) else super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._holder(name), name) if self._holder(name) else super().__delattr__(name)

    def __dir__(self) -> list[str]:
        return sorted({*vars(self)["_own"], *dir(vars(self)["_real"] or object)})

    def _holder(self, name: str) -> ModuleType | None:
        """Return the module whose name it is; None if it is this one's."""
        return vars(self)["_ours" if name in vars(self)["_own"] else "_real"]


def install(package: str) -> None:
    """Let ``from PACKAGE.p2p_communication_patch import ...``, and ``.parallel_state_patch``, give the plugin's names.

    Where the package is installed, it is imported first, and names that the plugin does not have are the package's.
    What is not installed is made up. A second call does nothing; ``vtp_plugin.revert()`` undoes it.

    Args:
        package: such as ``"mindspeed_mm.patchs.layerwise_disaggregated_training"``.

    Raises:
        ConfigError: this is no name of a package, or importing it fails.
    """
    if not all(part.isidentifier() for part in package.split(".")):
        raise ConfigError(f"install({package!r}); a package has a dotted name; give it as in the import lines")
    undo = installed_modules()
    for name in accumulate(package.split("."), "{}.{}".format):
        if _import(name) is None:
            spec = ModuleSpec(name, None, is_package=True)
            _put(name, importlib.util.module_from_spec(spec), undo)
    for name, ours in _MODULES.items():
        full = f"{package}.{name}"
        real = _import(full)
        if not isinstance(real, _StandIn):
            _put(full, _StandIn(full, ours, real), undo)


def _import(name: str) -> ModuleType | None:
    """Import a module of the package; None if it is not there."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return None
        problem: Exception = error
    except Exception as error:
        problem = error
    raise ConfigError(
        f"importing {name} fails with {problem!r}; the plugin's functions can replace only a module that imports; "
        "fix it, or take it off the path"
    ) from problem


def _put(name: str, module: ModuleType, undo: UndoStack) -> None:
    """Make a module be what import lines find, also as an attribute of its package."""
    undo.put(Item(sys.modules, name), module)
    package, _, last = name.rpartition(".")
    if package:
        undo.put(Name(sys.modules[package], last), module)
