"""What goes through all features."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeaturesManager:
    """Holds the features."""

    FEATURES_LIST: list[Any] = []

    @classmethod
    def set_features_list(cls, features_list: list[Any]) -> None:
        """Replace the content of the list."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def apply_features_pre_patches(cls, args: Namespace) -> None:
        """Patch what Megatron imports."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: Namespace) -> None:
        """Patch Megatron."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(MindSpeedPatchesManager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        """Declare the flags of all features."""
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def validate_features_args(cls, args: Namespace) -> None:
        """Check the arguments."""
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def remove_patches(cls) -> None:
        """Take all patches out."""
        MindSpeedPatchesManager.remove_patches()
