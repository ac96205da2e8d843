"""How busy this machine is: limits of time that a test has to wait for grow with it."""

from __future__ import annotations

import time

# Long enough to be slowed down: a scheduler runs a short burst at once even on a busy machine.
_SAMPLE_S = 0.1


def pace() -> float:
    """Return a factor for limits that are ample on an idle machine: 1 there, about five beside ten processes a core.

    It is half of how many times longer than on an idle core a computation takes now. Tests that wait for a timeout of
    the plugin cannot just have a long one, as on an idle machine they would take as long.
    """
    begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - begin_cpu_s < _SAMPLE_S:
        pass
    return max(1.0, (time.monotonic() - begin_s) / _SAMPLE_S / 2)
