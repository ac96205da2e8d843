"""The patch manager: replacements and stacked wrappers by dotted name, put in place all at once."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


class Patch:
    """All that is registered for one name."""

    def __init__(self, name: str) -> None:
        self.module_name, _, self.name = name.rpartition(".")
        self.orig_module: Any = None
        self.orig_func: Any = None
        self.patch_func: Any = None
        self.final_patch_func: Any = None
        self.wrappers: list[Callable[[Any], Any]] = []
        self.is_applied = False

    def set_patch_func(self, new: Any, force_patch: bool) -> None:
        """Stack a function whose name ends in "wrapper" or "decorator"; let any other replace the original."""
        if getattr(new, "__name__", "").endswith(("wrapper", "decorator")):
            if new not in self.wrappers:
                self.wrappers.append(new)
        elif self.patch_func is not None and not force_patch:
            raise RuntimeError(f"the patch of {self.name} exist !")
        else:
            self.patch_func = new
        self.is_applied = False

    def apply_patch(self) -> None:
        """Rebuild what belongs there from the first original, and rebind all names of modules that hold the last."""
        if self.is_applied:
            return
        owner = _resolve(self.module_name)
        now = getattr(owner, self.name)
        if self.orig_module is None:
            self.orig_module, self.orig_func = owner, now
        final = self.orig_func if self.patch_func is None else self.patch_func
        for wrapper in self.wrappers:
            final = wrapper(final)
        setattr(self.orig_module, self.name, final)
        for module in list(sys.modules.values()):
            if getattr(module, self.name, None) is now:
                setattr(module, self.name, final)
        self.is_applied, self.final_patch_func = True, final

    def remove_patch(self) -> None:
        """Put the original back where the last replacement is, except in modules of MindSpeed."""
        for name, module in list(sys.modules.items()):
            owner = self.orig_module if inspect.isclass(self.orig_module) else module
            is_held = hasattr(owner, self.name) and getattr(owner, self.name) is self.final_patch_func
            if is_held and "mindspeed" not in name:
                setattr(owner, self.name, self.orig_func)
        self.patch_func = self.final_patch_func = None
        self.is_applied = False


class MindSpeedPatchesManager:
    """What MindSpeed calls its patches with."""

    patches_info: dict[str, Patch] = {}

    @staticmethod
    def register_patch(
        orig_func_name: str, new_func: Any = None, force_patch: bool = False, create_dummy: bool = False
    ) -> None:
        """Register a patch; it takes effect with `apply_patches`."""
        patches = MindSpeedPatchesManager.patches_info
        patches.setdefault(orig_func_name, Patch(orig_func_name)).set_patch_func(new_func, force_patch)

    @staticmethod
    def remove_wrappers(orig_func_name: str, wrappers_name: str, remove_check: bool = True) -> None:
        """Forget wrappers by their names."""
        patch = MindSpeedPatchesManager.patches_info[orig_func_name]
        patch.wrappers[:] = [wrapper for wrapper in patch.wrappers if wrapper.__name__ != wrappers_name]

    @staticmethod
    def remove_patches() -> None:
        """Take all patches out."""
        for patch in MindSpeedPatchesManager.patches_info.values():
            patch.remove_patch()
            patch.wrappers.clear()

    @staticmethod
    def apply_patches() -> None:
        """Put in place what has changed since the last call."""
        for patch in list(MindSpeedPatchesManager.patches_info.values()):
            patch.apply_patch()


def _resolve(path: str) -> Any:
    """Import a module, or look a class of it up."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(_resolve(parent), name)
