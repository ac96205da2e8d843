"""MindSpeed below our patches: it patches Megatron for Ascend, and ours lie around its."""

from __future__ import annotations

import argparse
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

from vtp_plugin.errors import PatchError
from vtp_plugin.host.patching import AppliedPatches, rebuild
from vtp_plugin.host.patching.engine import Patch

_NAME = "vtp_plugin"
_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_SCHEDULE = "megatron.core.pipeline_parallel.schedules"
_BELOW_EXCHANGE = (
    *(f"{_P2P}.{name}" for name in ("_communicate", "_communicate_shapes", "_p2p_ops", "_batched_p2p_ops")),
    *(f"{_P2P}.P2PCommunicator.{name}" for name in ("_communicate", "_communicate_shapes")),
)
"""What exchanges tensors between stages: ours runs instead."""
_SCHEDULES = (f"{_SCHEDULE}.get_forward_backward_func",)
"""What a planned schedule goes past. Of the functions below it, MindSpeed-LLM always wraps one, for its --stage."""
_LINEAR_LAYERS = tuple(
    f"megatron.core.tensor_parallel.layers.{name}"
    for name in (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "linear_with_grad_accumulation_and_async_allreduce",
        "LinearWithGradAccumulationAndAsyncCommunication",
    )
)
"""What a split backward takes apart, with all that is inside. Its patch calls neither of the last two."""
_LENGTHS = "mindspeed.core.pipeline_parallel.variable_seq_length."
"""What --variable-seq-lengths puts there: shapes cross before tensors. Ours lies around it, and sends headers."""
_OWN_U_SHAPE = "mindspeed_llm.core.layerwise_disaggregated_training"


class MindSpeed:
    """What this process has loaded of MindSpeed.

    Our replacements are registered with its patch manager, as wrappers of a feature that comes last. When MindSpeed
    puts its patches in place again (``apply_patches()``, ``repatch()``), ours are put around them again.
    """

    def __init__(self) -> None:
        """Find the managers.

        Raises:
            PatchError: this MindSpeed has none; it is older than the supported ones.
        """
        try:
            self._features = importlib.import_module(
                "mindspeed.features_manager.features_manager"
            ).MindSpeedFeaturesManager
            self._base = importlib.import_module("mindspeed.features_manager.feature").MindSpeedFeature
            self._patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager
        except (ImportError, AttributeError) as error:
            raise PatchError(
                f"MindSpeed is loaded and has no manager of features ({error}); use a branch of MindSpeed for Megatron "
                "0.12 or newer, such as 26.1.0_core_r0.12.1"
            ) from error
        self._wrappers: dict[str, Callable[[Any], Any]] = {}
        self._feature: Any = None

    @functools.cached_property
    def flags(self) -> frozenset[str]:
        """Return the flags that its features declare."""
        # As Megatron's: a feature of MindSpeed-LLM parses the command line here, where --save abbreviates two flags.
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        self._features.register_features_args(parser)
        return frozenset(parser._option_string_actions)

    def problems(self, *, is_planned: bool, is_split: bool) -> Iterator[str]:
        """Say what MindSpeed has put where a run with a list goes past it, or would be wrong.

        Args:
            is_planned: the schedule is planned: Megatron's, and what MindSpeed makes of it, does not run.
            is_split: gradients of weights are to be computed apart.
        """
        if is_split:
            yield from self.problems_of_split()
        for name in (*_BELOW_EXCHANGE, *(_SCHEDULES if is_planned else ())):
            for home in self._homes(name):
                if home.startswith(_LENGTHS):
                    continue
                if home.startswith(_OWN_U_SHAPE):
                    yield (
                        "MindSpeed-LLM's own --layerwise-disaggregated-training is in place, since its adaptor reads "
                        "the command line; start the script with python -m vtp_plugin run, which takes the flag over, "
                        "or leave the flag out and call apply(layerwise_disaggregated=True)"
                    )
                    return
                yield (
                    f"{home} of MindSpeed replaces {name}, which a run with --vtp-size-list"
                    f"{' and a planned schedule' if name in _SCHEDULES else ''} does not use; leave out the flag that "
                    "switches it on"
                )

    def problems_of_split(self) -> Iterator[str]:
        """Say what MindSpeed has put in the place of Megatron's linear layers, or of what computes their gradients.

        What has linear layers of its own besides, such as its grouped experts, computes them at once.
        """
        for name in self._patches.patches_info:
            for home in self._homes(name) if name.startswith(_LINEAR_LAYERS) else ():
                yield (
                    f"--vtp-split-backward with {home} of MindSpeed in the place of {name}; only Megatron's own linear "
                    "layers leave gradients of weights for later; leave out the flag that switches it on, or "
                    "--vtp-split-backward"
                )

    def _homes(self, name: str) -> list[str]:
        """Return the modules of what is registered for a name, ours apart."""
        entry = self._patches.patches_info.get(name)
        if entry is None:
            return []
        functions = (
            entry.patch_func,
            *(wrapper for wrapper in entry.wrappers if wrapper is not self._wrappers.get(name)),
        )
        return [function.__module__ for function in functions if function is not None]

    def keep(self, applied: AppliedPatches) -> None:
        """Let MindSpeed put these patches in place again whenever it does so with its own."""
        for patch in applied.patches:
            self._wrappers[patch.record.target.replace(":", ".")] = _wrapper(applied, patch)
        if self._feature is None:
            self._feature = _make_feature(self._base, self._register)
            self._features.FEATURES_LIST.append(self._feature)
        self._register(self._patches)

    def forget(self) -> None:
        """Take our patches out of its manager."""
        if self._feature in self._features.FEATURES_LIST:
            self._features.FEATURES_LIST.remove(self._feature)
        for name, wrapper in self._wrappers.items():
            if name in self._patches.patches_info:
                self._patches.remove_wrappers(name, wrapper.__name__, remove_check=False)
        self._wrappers.clear()

    def _register(self, manager: Any) -> None:
        for name, wrapper in self._wrappers.items():
            manager.register_patch(name, wrapper)


def _wrapper(applied: AppliedPatches, patch: Patch) -> Callable[[Any], Any]:
    """Make what the manager calls with an original, or what it has put in its place."""

    def wrap(below: Any) -> Any:
        return patch.new if below is patch.target.value else rebuild(applied, patch, below)

    # The manager stacks wrappers, and knows them by the end of their names.
    wrap.__name__ = f"{_NAME}_{patch.record.id}_wrapper"
    return wrap


def _make_feature(base: Any, register: Callable[[Any], None]) -> Any:
    """Make a feature of MindSpeed that is always on and does nothing but register patches."""

    class VtpFeature(base):
        def __init__(self) -> None:
            super().__init__(_NAME, optimization_level=0)

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            register(patch_manager)

    return VtpFeature()
