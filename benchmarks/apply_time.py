"""What ``apply()`` takes: medians over fresh processes that have imported Megatron as a script does.

    python -m benchmarks.apply_time
    python -m benchmarks.apply_time --before "import mindspeed.megatron_adaptor"

The second form, with MindSpeed and its Megatron on ``PYTHONPATH`` (without an NPU also ``tests/npu_stub``), measures
beside MindSpeed's patches. Every process applies all records for the list 1,2 and takes them back. Python's compiled
files are there, as pip leaves them: a first process, which does not count, writes those that are missing to a folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile

SCRIPT = """
import sys, time
sys.argv = ["script.py"]
import vtp_plugin
from vtp_plugin.api import choose_device
choose_device("cpu")
{before}
import megatron.training.training
begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
vtp_plugin.apply(vtp_size_list=[1, 2], device="cpu")
applied_s, applied_cpu_s = time.perf_counter(), time.process_time()
records = sum(len(applied.records) for applied in vtp_plugin.api._Holder.session.applied)
vtp_plugin.revert()
print("MEASURED", applied_s - begin_s, applied_cpu_s - begin_cpu_s, time.perf_counter() - applied_s, records)
"""


def _measure(before: str, compiled: str) -> list[float]:
    """Start a process; return seconds to apply, of them of CPU, seconds to revert, and the number of records."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**environment, "PYTHONPYCACHEPREFIX": compiled},
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("MEASURED")]
    if not lines:
        sys.exit(f"a process ended with {run.returncode}:\n{run.stderr[-3000:]}")
    return [float(word) for word in lines[0].split()[1:]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", default="", help="what a script imports before Megatron")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [_measure(options.before, folder) for _ in range(options.repeat + 1)][1:]
    applied_s, cpu_s, reverted_s, records = (statistics.median(column) for column in zip(*found, strict=True))
    print(
        f"apply() {applied_s:.2f} s (longest {max(row[0] for row in found):.2f} s; CPU {cpu_s:.2f} s, most "
        f"{max(row[1] for row in found):.2f} s), revert() {reverted_s:.2f} s, "
        f"{records:.0f} records, {options.repeat} processes"
    )


if __name__ == "__main__":
    main()
