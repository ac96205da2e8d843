"""In which form a checkpoint holds the distributed optimizer, in Megatron's words."""

from __future__ import annotations

from typing import Final

FORM: Final = "distrib_optim_sharding_type"
"""Where a checkpoint says in which form it holds it."""
BY_BUCKET: Final = "dp_reshardable"
"""Bucket by bucket, as it lies in memory: what Megatron does by itself from 0.15 on."""
IN_MODEL_SPACE: Final = "fully_reshardable"
"""Parameter by parameter, so that any layout can load it."""
