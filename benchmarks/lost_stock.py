"""How long it takes from the death of a rank to the next step, beside stock Megatron that is started again by hand.

    python -m benchmarks.lost_stock --out FOLDER --trials 5

Three CPU ranks on two nodes train ``tests/multiproc/faults/faulty_gpt.py``; a rank is killed and its card is bad from
then on. The plugin's run goes from 2,1 to 2 by itself. Stock Megatron, where stages have one size, uses two of the
three cards, one on each node; it is started again on one card when its launchers have ended, as if a hand took no time.
Both train in turn. Printed is a table of medians, from the kill on.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

from benchmarks.lost_cards import (
    FLAGS,
    MOMENTS,
    NOTICED,
    SCRIPT,
    STEP,
    Fault,
    Watcher,
    is_saved,
    strike,
    table_of_seconds,
    wait_until,
)
from tests.multiproc.faults.elastic import Cluster
from tests.multiproc.faults.fault_log import read_log

Seconds = dict[str, float | None]


def _one_kill(folder: Path) -> Seconds:
    fault = Fault(id="0", node="b", local_rank=0, phase="forward", kind="SIGKILL", bad=(("b", 0),), expected="2")
    flags = [*FLAGS, "--train-iters", "200", "--vtp-timeout-s", "40"]
    with Cluster(folder, flags, nodes="2", script=SCRIPT, max_restarts=3, pause_s=0.05) as cluster:
        cluster.start("a", 2)
        cluster.start("b", 1)
        found = strike(cluster, Watcher(cluster), fault)
    assert found["outcome"] == "went on", found
    return found["seconds"]


def _one_stock_kill(folder: Path) -> Seconds:
    def started(num_stages: int) -> Cluster:
        flags = ["--train-iters", "200", "--pipeline-model-parallel-size", str(num_stages)]
        nodes = str(num_stages)
        return Cluster(folder, flags, nodes=nodes, script=SCRIPT, max_restarts=0, is_static=True, pause_s=0.05)

    with started(2) as cluster:
        cluster.start("a", 1)
        cluster.start("b", 1)
        watcher = Watcher(cluster)
        assert wait_until(cluster, watcher, lambda: is_saved(cluster)), cluster.tail()
        killed = cluster.rank("b", 0)
        os.kill(killed, signal.SIGKILL)
        at_s = time.time()
        wait_until(cluster, watcher, lambda: None)  # until the launchers have ended
        ended_s = time.time()
    with started(1) as again:
        again.start("a", 1)
        later = Watcher(again)
        later.look()
        again_s = time.time()
        assert wait_until(again, later, lambda: later.first(STEP, again_s)), again.tail()
    begun = [entry["at_s"] for entry in read_log(folder / "faults.jsonl") if entry["event"] == "begin"]
    moments = (
        watcher.first(NOTICED, at_s),
        ended_s,
        max(begun),
        later.first("successfully loaded checkpoint", again_s),
        later.first(STEP, again_s),
    )
    seconds = (None if at is None else round(at - at_s, 2) for at in moments)
    return dict(zip(MOMENTS, seconds, strict=True))


def main() -> None:
    """Kill, in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs")
    parser.add_argument("--trials", type=int, default=5, metavar="N", help="of each")
    options = parser.parse_args()
    out = options.out.resolve() / f"stock-{int(time.time())}"
    times: dict[str, list[Seconds]] = {"this plugin": [], "stock, by hand": []}
    for number in range(options.trials):
        for name, trial in (("this plugin", _one_kill), ("stock, by hand", _one_stock_kill)):
            own = out / f"{number}-{name.partition(',')[0].replace(' ', '-')}"
            own.mkdir(parents=True)
            times[name].append(trial(own))
    print("\n".join(table_of_seconds(times)))


if __name__ == "__main__":
    main()
