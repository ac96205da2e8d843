"""Parts of Megatron that a plan is compared with, and that not every version has."""

from __future__ import annotations

from typing import Any

import pytest


def hyper_comm_grid() -> Any:
    """Return Megatron's class of that name; skips the test where the version has none."""
    reason = "this Megatron has no HyperCommGrid to compare with"
    return pytest.importorskip("megatron.core.hyper_comm_grid", reason=reason).HyperCommGrid
