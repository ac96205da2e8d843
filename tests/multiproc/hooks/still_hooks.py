"""Hooks that let one rank stand still in a load or a save for ever, or work in it for longer than the timeout."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as strategies

from tests.multiproc.hooks.in_place import Facts, Hook, before

SLOW = 1
"""The rank that does it."""


def _sleep() -> None:
    time.sleep(1000)


def _work() -> None:
    """Use the processor, as who hashes what it writes."""
    timeout_s = float(sys.argv[sys.argv.index("--vtp-timeout-s") + 1])
    end_s = time.monotonic() + 1.6 * timeout_s
    while time.monotonic() < end_s:
        sum(range(10000))


def _in_method(owner: Any, name: str, act: Callable[[], None]) -> Hook:
    def hook(facts: Facts) -> None:
        before(owner, name)(lambda *_args, **_kwargs: act() if os.environ["RANK"] == str(SLOW) else None)

    return hook


sleep_in_load = _in_method(strategies.TorchDistLoadShardedStrategy, "load", _sleep)
sleep_in_save = _in_method(filesystem_async.FileSystemWriterAsync, "prepare_write_data", _sleep)
work_in_save = _in_method(filesystem_async.FileSystemWriterAsync, "prepare_write_data", _work)
