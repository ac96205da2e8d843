"""Why adapters have not been run: PEFT's layers for Megatron cannot be built, whatever the stages."""

from __future__ import annotations

import pytest

from tests.pool import Pool, PoolError


def test_layers_of_peft_cannot_be_built(pool: Pool) -> None:
    """Stock Megatron, one rank. When this fails, PEFT is mended: run adapters on unequal stages."""
    pytest.importorskip("peft", reason="it is about PEFT's layers")
    with pytest.raises(PoolError, match=r"KeyError: '(fan_in_fan_out|default)'|has no attribute 'get'"):
        pool.run(1, "tests.multiproc.adapters_job:build_adapters")
