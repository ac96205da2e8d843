"""H17: a process that saves a checkpoint starts, on every Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vtp_plugin.patches.moment import Moment
from vtp_plugin.patching import replaces

# How long threads of gloo may take to let go of tensors: they need the interpreter's lock, and much less than this.
_WAIT_S = 0.2


@replaces(
    "megatron.core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller.schedule_async_call",
    id="H17",
    when=Moment.LIST,
    why="it forks. On Python before 3.12 (bug gh-112275) the child hangs now and then where a thread of gloo frees "
    "the tensor of a collective that has just ended, and all ranks wait for it for ever",
    remove_when="Python 3.11 is no longer supported",
)
def _start(python: tuple[int, int], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `schedule_async_call` when no thread of gloo is between two states.

    The child inherits the interpreter's list of threads as it is, locked or not, and older Pythons take the lock before
    they make it anew. A thread of gloo takes it to free a tensor that Python has dropped already. Megatron's
    collectives have ended here, so no such thread begins after those that we wait for.
    """
    if python < (3, 12):
        time.sleep(_WAIT_S)
    return original(*args, **kwargs)
