"""Try one card: is it there, does it compute correctly, does it answer? Runs as a script in a process of its own.

The process may hang or die with its card, and takes the card's memory with it. It imports torch only where there may
be an accelerator, and nothing of the plugin. It prints :data:`READY` once all is imported: how long that takes says
nothing about the card.

On CPUs a fault file simulates bad cards: each line has a node's name, a local rank, and absent, erring or hanging.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

_SIZE = 512
READY = "ready"
"""The line that is printed before the card is used for the first time."""


def probe(device: str, node: str, local_rank: int, fault_file: str) -> dict[str, str]:
    """Return the kind of the card, and why it is bad; empty if it is good.

    Args:
        device: ``cuda``, ``npu``, ``cpu``, or ``auto`` for the first of these that is there.
        node: name of this machine.
        local_rank: index of the card.
        fault_file: path of the fault file; empty for none.
    """
    if device == "cpu":
        print(READY, flush=True)
    module = None if device == "cpu" else _accelerator(device)
    if module is None:
        return {"kind": "cpu", "why": _played(node, local_rank, fault_file)}
    import torch

    kind = module.__name__.rpartition(".")[2]
    if local_rank >= module.device_count():
        return {"kind": kind, "why": f"absent: {module.device_count()} {kind} devices are seen"}
    module.set_device(local_rank)
    whole = torch.arange(_SIZE * _SIZE, dtype=torch.float32).remainder(7).reshape(_SIZE, _SIZE)
    there = whole.to(f"{kind}:{local_rank}")
    # Small whole numbers: any order of sums is exact.
    is_right = torch.equal((there @ there).cpu(), whole @ whole)
    return {"kind": kind, "why": "" if is_right else "erring: a matrix product is wrong"}


def _accelerator(device: str) -> Any:
    import importlib
    import importlib.util

    import torch

    has_npu = device in ("npu", "auto") and importlib.util.find_spec("torch_npu") is not None
    if has_npu:
        importlib.import_module("torch_npu")
    print(READY, flush=True)
    if has_npu:
        return torch.get_device_module("npu")
    if device == "cuda" or torch.cuda.is_available():
        return torch.cuda
    return None


def _played(node: str, local_rank: int, fault_file: str) -> str:
    if not fault_file or not Path(fault_file).is_file():
        return ""
    for line in Path(fault_file).read_text().splitlines():
        if line.split()[:2] == [node, str(local_rank)]:
            fault = line.split()[2]
            while fault == "hanging":
                time.sleep(1)
            return f"{fault}: by the fault file"
    return ""


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])))
