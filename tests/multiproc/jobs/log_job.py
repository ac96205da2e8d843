"""Job of test_log: what a rank writes to standard error while megatron-core alone starts up."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

from megatron.core import parallel_state

import vtp_plugin
from tests.support.pool import TIMEOUT_S, init_gloo


def start(sizes: Sequence[int], **options: Any) -> str:
    """Apply the plugin, make the groups, and return what came out."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as stream:
        os.dup2(stream.fileno(), 2)
        try:
            init_gloo()
            vtp_plugin.apply(vtp_size_list=sizes, device="cpu", timeout_s=TIMEOUT_S, **options)
            parallel_state.initialize_model_parallel(pipeline_model_parallel_size=len(sizes))
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            parallel_state.destroy_model_parallel()
            vtp_plugin.revert()
        stream.seek(0)
        return stream.read().decode()
