"""The base of all features."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any


class MindSpeedFeature:
    """One feature; an optimization level of 0 means that it is always on."""

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.replace("-", "_")
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: Namespace) -> bool:
        """Tell whether the feature is switched on."""
        return self.default_patches or bool(getattr(args, self.feature_name, None))

    def register_args(self, parser: ArgumentParser) -> None:
        """Declare flags."""

    def validate_args(self, args: Namespace) -> None:
        """Check the arguments after Megatron's checks."""

    def pre_register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register what must be in place before Megatron is imported."""

    def register_patches(self, patch_manager: Any, args: Namespace) -> None:
        """Register patches of Megatron."""
