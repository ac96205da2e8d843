"""`fork-to-save`: a process that saves a checkpoint starts, on every Python.

`atomic-checkpoint/dead-worker`: if it ends too early, so does the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from vtp_plugin.host.patching import replaces
from vtp_plugin.patches.patch_set import Moment
from vtp_plugin.runtime.health.failure_hook import ended_early

# How long threads of gloo may take to let go of tensors: they need the interpreter's lock, and much less than this.
_WAIT_S = 0.2
_POLL_S = 0.05


@replaces(
    "megatron.core.dist_checkpointing.strategies.async_utils:TemporalAsyncCaller.schedule_async_call",
    id="fork-to-save",
    when=Moment.LIST,
    remove_when="Python 3.11 is no longer supported",
)
def _start(python: tuple[int, int], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `schedule_async_call` when no thread of gloo is between two states.

    Why: it forks. On Python before 3.12 (bug gh-112275) the child hangs now and then where a thread of gloo frees the
    tensor of a collective that has just ended, and all ranks wait for it for ever.

    The child inherits the interpreter's list of threads as it is, locked or not, and older Pythons take the lock before
    they make a new one. A thread of gloo takes it to free a tensor that Python has dropped already. Megatron's
    collectives have ended here, so no such thread begins after those that we wait for.
    """
    if python < (3, 12):
        time.sleep(_WAIT_S)
    return original(*args, **kwargs)


@replaces(
    "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller.is_current_async_call_done",
    id="atomic-checkpoint/dead-worker",
    when=Moment.LIST,
    remove_when="Megatron looks whether its process lives",
)
def _is_done(original: Callable[..., bool], caller: Any, *args: Any, **kwargs: Any) -> bool:
    """Run `is_current_async_call_done`, which must not wait; first wait here, as long as the process lives.

    Why: it waits for ever for a process that is gone, because it was killed, or had no memory: nothing more is saved,
    and the run does not end.

    Raises:
        PeerError: the process has ended before it had written all.
    """
    is_patient = bool(kwargs.get("blocking", args[0] if args else False))
    while caller.process is not None and caller.cur_item is None and _answers(caller).empty():
        # What it has said before its end arrives later than the news of that.
        if not caller.process.is_alive() and _answers(caller).empty():
            writer = f"the process that saves checkpoints for rank {dist.get_rank()}"
            raise ended_early(writer, caller.process.exitcode)
        if not is_patient:
            break
        time.sleep(_POLL_S)
    return original(caller, *args, **kwargs)


def _answers(caller: Any) -> Any:
    """Return the queue in which the process says what it has done; newer Megatrons share it among callers."""
    return caller._persistent_comp_q if hasattr(caller, "_persistent_comp_q") else caller.comp_q
