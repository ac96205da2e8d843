"""Features that touch what the plugin touches."""

from __future__ import annotations

import functools
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager


def _wrapping(name: str, after: Callable[[Any], None] = lambda result: None) -> Callable[[Any], Any]:
    """Make a wrapper that notes each call in ``mindspeed.calls``."""

    def wrapper(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            sys.modules["mindspeed.calls"].NAMES.append(name)
            result = original(*args, **kwargs)
            after(result)
            return result

        return call

    return wrapper


def parse_args_wrapper(parse_args: Any) -> Any:
    """Let features declare their flags behind those of the script."""

    @functools.wraps(parse_args)
    def wrapper(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        def provider(parser: ArgumentParser) -> ArgumentParser:
            if extra_args_provider is not None:
                parser = extra_args_provider(parser)
            MindSpeedFeaturesManager.register_features_args(parser)
            return parser

        return parse_args(provider, ignore_unknown_args)

    return wrapper


class BasicFeature(MindSpeedFeature):
    """Always on, as MindSpeed's basic features are."""

    def __init__(self) -> None:
        super().__init__("megatron-basic", optimization_level=0)

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Refuse a Megatron that somebody has imported: it holds what would be replaced now."""
        if "mindspeed.calls" not in sys.modules and "megatron.core" in sys.modules:
            raise RuntimeError("Megatron was imported before MindSpeed's adaptor")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Wrap functions, and replace a class and a function, that the plugin replaces too."""
        import mindspeed.calls
        import mindspeed.training  # holds names of Megatron, as MindSpeed-LLM's training loop does

        assert mindspeed.training.finalize_model_grads is not None
        checks = _wrapping("validate_args", MindSpeedFeaturesManager.validate_features_args)
        patch_manager.register_patch("megatron.training.arguments.parse_args", parse_args_wrapper)
        patch_manager.register_patch("megatron.training.arguments.validate_args", checks)
        patch_manager.register_patch(
            "megatron.core.parallel_state.initialize_model_parallel", _wrapping("initialize_model_parallel")
        )
        patch_manager.register_patch("megatron.core.transformer.torch_norm.WrappedTorchNorm", mindspeed.training.Norm)


class OwnLinearLayersFeature(MindSpeedFeature):
    """As those that keep or quantize weights between forward and backward."""

    def __init__(self) -> None:
        super().__init__("own-linear-layers")

    def register_args(self, parser: ArgumentParser) -> None:
        """Declare the flag."""
        parser.add_argument("--own-linear-layers", action="store_true")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Wrap the backward of Megatron's linear layers."""
        backward = "megatron.core.tensor_parallel.layers.LinearWithGradAccumulationAndAsyncCommunication.backward"
        patch_manager.register_patch(backward, _wrapping("backward"))


class OwnUShapeFeature(MindSpeedFeature):
    """As MindSpeed-LLM's own layerwise-disaggregated training: it asks the arguments while patches are registered."""

    def __init__(self) -> None:
        super().__init__("u-shaped-split", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        """Declare two flags that the plugin has too, and parse the command line, where --lr abbreviates two others."""
        parser.add_argument("--layerwise-disaggregated-training", action="store_true")
        parser.add_argument("--num-layer-list", type=str)
        parser.add_argument("--lr-of-the-edge", type=float)
        parser.add_argument("--lr-of-the-cloud", type=float)
        parser.parse_known_args()

    def validate_args(self, args: Namespace) -> None:
        """Read what MindSpeed reads."""
        if args.num_layer_list and len(args.num_layer_list.split(",")) != args.pipeline_model_parallel_size:
            raise ValueError("len(args.num_layer_list) != args.pipeline_model_parallel_size")

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Replace the schedule."""
        if args.layerwise_disaggregated_training:
            patch_manager.register_patch(
                "megatron.core.pipeline_parallel.schedules.get_forward_backward_func", _own_schedule
            )


def _own_schedule(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the fake has no schedule")


_own_schedule.__module__ = "mindspeed_llm.core.layerwise_disaggregated_training.schedules"
