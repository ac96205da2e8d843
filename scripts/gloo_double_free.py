"""Shows that two threads of one gloo group of torch free one string: counts processes that it ends.

    python scripts/gloo_double_free.py [--seconds 20] [--processes 5]

Each process is a world of one rank on gloo and starts small collectives, 50 at a time. No Megatron, no plugin, no peer.
docs/development/gloo-double-free.md says why the coalesced all-gather ends its process and the plain one does not.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

AT_ONCE = 50


def main() -> None:
    """Run both kinds of all-gather in processes of their own and print what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="longest time of a process")
    parser.add_argument("--processes", type=int, default=5, help="processes for each kind of all-gather, in turn")
    parser.add_argument("--only", choices=STARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        stress(STARTS[options.only], options.seconds)
        return
    print(f"torch {torch.__version__}")
    for kind in STARTS:
        ends: Counter[str] = Counter()
        times_s: list[float] = []
        for _ in range(options.processes):
            begin_s = time.monotonic()
            command = [sys.executable, __file__, "--only", kind, "--seconds", str(options.seconds)]
            done = subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
            times_s.append(time.monotonic() - begin_s)
            ends[signal.Signals(-done.returncode).name if done.returncode < 0 else f"exit {done.returncode}"] += 1
        shown = ", ".join(f"{count} x {end}" for end, count in ends.items())
        print(f"{kind} all-gather: {shown}; {min(times_s):.1f} to {max(times_s):.1f} s each")


def stress(start: Callable[[torch.Tensor], list[dist.Work]], duration_s: float) -> None:
    """Start collectives and wait for them until the time is over."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    own = torch.ones(4)
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        for work in [work for _ in range(AT_ONCE) for work in start(own)]:
            work.wait()
    dist.destroy_process_group()


def start_coalesced(own: torch.Tensor) -> list[dist.Work]:
    """Start an all-gather as Megatron's distributed optimizer does."""
    with dist._coalescing_manager(async_ops=True) as started:
        dist.all_gather_into_tensor(torch.empty(4), own)
    return started.works


def start_plain(own: torch.Tensor) -> list[dist.Work]:
    """Start the same all-gather by itself."""
    work = dist.all_gather_into_tensor(torch.empty(4), own, async_op=True)
    assert work is not None
    return [work]


STARTS = {"coalesced": start_coalesced, "plain": start_plain}

if __name__ == "__main__":
    main()
