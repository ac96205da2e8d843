"""Certify the plugin on your machines: train a small GPT on several layouts, and compare; ends with a table to paste.

On two machines with two devices each, start it on both, and change the number:

    python tests/device/certify.py --device npu --machines 2 --machine 0 --master-addr 10.0.0.1
    python tests/device/certify.py --device npu --machines 2 --machine 1 --master-addr 10.0.0.1

On one machine with three devices, ``python tests/device/certify.py --device cuda`` is all. With ``--share`` one GPU is
enough, if NCCL is 2.30 or later: ranks share it (see ``tests/support/devices.py``). Each layout is a run of
``examples/core_only.py`` under torchrun. The last machine sees the losses, and prints the table. The exit code is 0 if
every layout that fits trains as the uniform one.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # it is started as a script
from tests.support.devices import can_share, num_devices, sharing

LAYOUTS = ("1,1", "1,2", "2,1", "2,2", "1,3", "1,1,1", "1,2,2")
TOLERANCE = 1e-4  # of single precision on a device, whose sums have another order; on CPU it is 1e-6
_LOSS = re.compile(r"step +\d+.*?loss +([\d.]+)")
_PACKAGES = ("torch", "torch-npu", "megatron-core", "mindspeed", "mindspeed-llm", "vtp-plugin")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a layout went.

    Attributes:
        sizes: tensor-parallel size of every stage.
        losses: of every step; empty where it failed.
        note: why it did not run, or the end of its output.
    """

    sizes: str
    losses: tuple[float, ...] = ()
    note: str = ""


def ranks_here(sizes: str, machine: int, machines: int) -> int:
    """Return how many ranks of a layout a machine runs: stages are dealt out in order, the last machine takes the rest.

    >>> [ranks_here("1,2,2", machine, 2) for machine in (0, 1)]
    [1, 4]
    >>> ranks_here("1,2", 0, 1)
    3
    """
    stages = [int(size) for size in sizes.split(",")]
    return sum(stages[machine:]) if machine == machines - 1 else stages[machine]


def run_layout(sizes: str, options: argparse.Namespace, port: int) -> Outcome:
    """Train one layout; all machines call this in the same order."""
    most = max(ranks_here(sizes, machine, options.machines) for machine in range(options.machines))
    if most > options.devices and not options.share:
        return Outcome(sizes, note=f"needs more than {options.devices} devices on a machine")
    here = ranks_here(sizes, options.machine, options.machines)
    shared, variables = sharing(here, options.devices) if options.share else ([], {})
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nnodes={options.machines}", f"--node-rank={options.machine}"),
        *(f"--nproc-per-node={here}",),
        *(f"--master-addr={options.master_addr}", f"--master-port={port}"),
        *shared,
        *(str(ROOT / "examples" / "core_only.py"), "--sizes", sizes, "--device", options.device),
        *("--steps", str(options.steps)),
    ]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= variables
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=options.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(sizes, note=f"no end within {options.timeout_s:g} s")
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if "rror: " in line]
        return Outcome(sizes, note=(lines or ["it failed without a line"])[0][:200])
    return Outcome(sizes, tuple(float(loss) for loss in _LOSS.findall(done.stdout)))


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two runs.

    >>> largest_difference([2.0, 1.0], [2.0, 1.25])
    0.2
    """
    return max(abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True))


def table(outcomes: Sequence[Outcome], options: argparse.Namespace) -> tuple[list[str], bool]:
    """Write the table, and tell whether every layout that ran is equal to the first one of as many stages."""
    system = f"{platform.platform()}, Python {sys.version.split()[0]}"
    lines = [f"{options.device} on {options.machines} machine{'s' if options.machines > 1 else ''}, {system}"]
    lines += ["ranks share devices"] if options.share else []
    lines += [", ".join(f"{name} {_version(name)}" for name in _PACKAGES if _version(name)), ""]
    lines += ["| layout | first loss | last loss | largest relative difference | verdict |", "|---|---|---|---|---|"]
    references: dict[int, tuple[float, ...]] = {}  # one stage more draws other weights
    is_well = bool(outcomes[0].losses)
    for outcome in outcomes:
        if not outcome.losses:
            is_well &= outcome.note.startswith("needs more")
            lines.append(f"| {outcome.sizes} | | | | {outcome.note} |")
            continue
        is_first = outcome.sizes.count(",") not in references
        reference = references.setdefault(outcome.sizes.count(","), outcome.losses)
        difference = None if is_first else largest_difference(outcome.losses, reference)
        is_equal = difference is None or difference <= TOLERANCE
        falls = outcome.losses[-1] < outcome.losses[0]
        is_well &= is_equal and falls
        verdict = ("trains" if is_first else "equal") if is_equal and falls else "**wrong**"
        shown = "" if difference is None else f"{difference:.1e}"
        lines.append(f"| {outcome.sizes} | {outcome.losses[0]} | {outcome.losses[-1]} | {shown} | {verdict} |")
    return lines, is_well


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _problem(options: argparse.Namespace) -> str:
    """Say why nothing can run here; empty if it can."""
    if not options.devices:
        return f"--device {options.device}: torch sees no such device on this machine"
    if options.share and not (options.device == "cuda" and can_share()):
        return "--share: only GPUs can be shared, with NCCL 2.30 or later; give every rank a device of its own"
    return ""


def main() -> None:
    """Run all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("npu", "cuda", "cpu"), required=True)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--machine", type=int, default=0, help="number of this machine, from 0")
    parser.add_argument("--master-addr", default="127.0.0.1", help="address of machine 0")
    parser.add_argument("--master-port", type=int, default=29600, help="each layout takes the next port")
    parser.add_argument("--devices", type=int, help="devices of the smallest machine; default: those of this one")
    parser.add_argument("--share", action="store_true", help="let ranks share GPUs; needs NCCL 2.30")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), help="first of each length the uniform one")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one layout")
    options = parser.parse_args()
    if options.devices is None:
        options.devices = 64 if options.device == "cpu" else num_devices(options.device)
    if problem := _problem(options):
        sys.exit(f"certify: {problem}")
    outcomes = []
    for number, sizes in enumerate(options.layouts):
        print(f"layout {sizes} ...", flush=True)
        outcomes.append(run_layout(sizes, options, options.master_port + number))
    if options.machine != options.machines - 1:
        print("done; the last machine prints the table")
        return
    lines, is_well = table(outcomes, options)
    print("\n".join(["", *lines]))
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
