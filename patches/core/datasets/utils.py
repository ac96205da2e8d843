"""`dataset-helper`: the wheel holds the dataset helper compiled already."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment


@replaces("megatron.core.datasets.utils:compile_helpers", id="dataset-helper", when=Moment.PLATFORM)
def _compile_if_missing(original: Callable[[], None]) -> None:
    """Run `compile_helpers` only where the compiled helper is missing, as in a checkout of Megatron.

    Why: the wheel ships the compiled helper but no Makefile; start-up calls make and exits.

    Remove when: Megatron compiles only what is missing.
    """
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        original()
