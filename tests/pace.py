"""How fast this machine is at the moment: limits that a test must wait for grow with it."""

from __future__ import annotations

import time

_SAMPLE_S = 0.03


def slowness() -> float:
    """Return how many times longer than on an idle core a computation takes now; at least 1.

    Beside twenty busy processes on two cores this is about ten. Tests that wait for a timeout of the plugin cannot just
    have a long one, as on an idle machine they would take as long.
    """
    begin_s, begin_cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - begin_cpu_s < _SAMPLE_S:
        pass
    return max(1.0, (time.monotonic() - begin_s) / _SAMPLE_S)
