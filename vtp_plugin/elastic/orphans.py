"""End the processes that a killed rank leaves behind, such as those that write Megatron's checkpoints.

torchrun starts each rank in a group of its own, and ends the group of a rank that lives, but not of one that was
killed. A process that the rank has started then waits for work forever. So a small process, which runs this file as
a script, looks whether the rank still lives, and then ends the rank's group and removes the folder that multiprocessing
makes for the rank and its children: for sockets, and for the files of
:meth:`~vtp_plugin.checkpoint.save.saving.Savings.scratch`. It imports neither torch nor the plugin.
"""

from __future__ import annotations

import contextlib
import multiprocessing.util
import os
import shutil
import signal
import subprocess
import sys
import time

_LOOK_S = 0.5


def end_orphans() -> bool:
    """Let the processes that this one starts end with it; return False if the group is not its own, as in a shell.

    Processes that it has put into groups of their own are left alone.
    """
    if os.name != "posix" or os.getpgrp() != os.getpid():
        return False
    folder = multiprocessing.util.get_temp_dir()  # made here, so that its name is known before the rank is killed
    command = [sys.executable, "-S", "-E", __file__, str(os.getpid()), folder]
    # Not in the rank's group, which torchrun kills if the rank does not end when told to.
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    return True


def _watch(rank: int, folder: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == rank:
        time.sleep(_LOOK_S)
    with contextlib.suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(rank, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
