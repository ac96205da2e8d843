"""What the server of tests.support.pool imports once, before it forks a worker: they all share these pages.

Importing torch and Megatron costs four seconds of a core; a fork of a process that has them costs 20 ms.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import warnings

from tests.support.pool import ENVIRONMENT

os.environ.update(ENVIRONMENT)
# Connect pairs when they first talk: with 25 groups a job, connecting every pair of each at once costs seconds,
# and now and then (seen with 6 ranks on 2 cores) a connection attempt waits for its 20 s retry.
os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tests.multiproc.jobs.core_job

    if importlib.util.find_spec("megatron.training") is not None:  # older wheels have megatron.core only
        import tests.multiproc.jobs.script_job  # noqa: F401

gc.collect()
# Half a million objects that stay for ever: without this every collection of every worker looks at them for 0.2 s.
gc.freeze()
