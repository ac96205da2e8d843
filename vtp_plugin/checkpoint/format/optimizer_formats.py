"""The formats in which a checkpoint may hold the distributed optimizer, in Megatron's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

FORM: Final = "distrib_optim_sharding_type"
"""Where a checkpoint says in which form it holds it."""
TYPE: Final = "param_state_sharding_type"
"""Where each optimizer says so."""
BY_BUCKET: Final = "dp_reshardable"
"""Bucket by bucket, as it lies in memory: what Megatron does by itself from 0.15 on."""
IN_MODEL_SPACE: Final = "fully_reshardable"
"""Parameter by parameter, so that any layout can load it."""
BY_BUCKET_OLDER: Final = "fully_sharded_bucket_space"
"""The same with Megatron 0.12, with padding, which it does if it is asked to."""
BY_BLOCK: Final = "fully_sharded_model_space"
"""Parameter by parameter, each rank's block flat, on one grid for all: what Megatron 0.12 to 0.14 does by itself."""

BY_RANK: Final = "dp_zero_gather_scatter"
"""One object for each data-parallel group, with its buckets: Megatron 0.12 with ``--no-ckpt-fully-parallel-save``."""
PLAIN: Final = "plain"
"""Our word for an optimizer that is not distributed."""
IN_BUCKETS: Final = (BY_BUCKET, BY_BUCKET_OLDER, BY_RANK)
"""Forms that do not say which parameter lies where."""


def stored_optimizers(common: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what each optimizer of a chain, or the only one, says of itself; without one, nothing.

    Args:
        common: what all ranks share of a checkpoint.

    >>> [each[TYPE] for each in stored_optimizers({"optimizer": {0: {TYPE: BY_BLOCK}, 1: {TYPE: BY_BLOCK}}})]
    ['fully_sharded_model_space', 'fully_sharded_model_space']
    """
    stored = common.get("optimizer")
    parts = (stored, *stored.values()) if isinstance(stored, dict) else ()
    yield from (part for part in parts if isinstance(part, dict) and TYPE in part)
