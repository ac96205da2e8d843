"""The adaptor: importing it reads the command line and patches Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from mindspeed.features_manager import MindSpeedFeaturesManager


def _early_args() -> argparse.Namespace:
    """Read the flags of the features from the command line, before Megatron does."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    MindSpeedFeaturesManager.register_features_args(parser)
    return parser.parse_known_args()[0]


def repatch(changes: Mapping[str, object]) -> None:
    """Take all patches out and put them in place anew, as frameworks for reinforcement learning ask for."""
    MindSpeedFeaturesManager.remove_patches()
    vars(_ARGS).update(changes)
    MindSpeedFeaturesManager.apply_features_pre_patches(_ARGS)
    MindSpeedFeaturesManager.apply_features_patches(_ARGS)


_ARGS = _early_args()
MindSpeedFeaturesManager.apply_features_pre_patches(_ARGS)
MindSpeedFeaturesManager.apply_features_patches(_ARGS)
