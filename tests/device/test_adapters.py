"""Adapters (LoRA) of mcore-bridge, which imports Transformer Engine: on stages of 1 and 2 devices as on two of 1.

It has not been run: none of us had mcore-bridge and a device together.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys

import pytest

from tests.support.devices import has_room_for, num_devices, sharing
from tests.support.hosts import ROOT

NUM_STEPS = 10  # in bf16 and with Adam, more of them drift apart
TOLERANCE = 0.01  # of bf16
DEVICE = "npu" if importlib.util.find_spec("torch_npu") else "cuda"


pytestmark = [
    pytest.mark.npu if DEVICE == "npu" else pytest.mark.gpu,
    pytest.mark.skipif(not importlib.util.find_spec("mcore_bridge"), reason="needs mcore-bridge"),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine"),
    pytest.mark.skipif(not has_room_for(3, DEVICE), reason="needs three CUDA devices or NPUs, or one and NCCL 2.30"),
]


def test_adapters_of_mcore_bridge() -> None:
    """Losses are those of equal stages, and fall; the script sees that the base stays."""
    losses, wanted = _losses("1,2"), _losses("1,1")
    assert len(losses) == len(wanted) == NUM_STEPS
    assert all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(losses, wanted, strict=True)), (losses, wanted)
    assert losses[-1] < (1 - 5 * TOLERANCE) * losses[0], f"the adapters train nothing: {losses}"


def _losses(sizes: str) -> list[float]:
    num_ranks = sum(map(int, sizes.split(",")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    shared, variables = sharing(num_ranks, num_devices(DEVICE))
    command += [
        *shared,
        str(ROOT / "tests" / "device" / "adapters.py"),
        "--sizes",
        sizes,
        "--device",
        DEVICE,
        "--steps",
        str(NUM_STEPS),
    ]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"loss (\S+)", process.stdout)]
