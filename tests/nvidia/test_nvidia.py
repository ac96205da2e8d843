"""NVIDIA's own tests of grids and bridges, unchanged, with the plugin's bridges in the place of Megatron's.

Opt-in: ``VTP_MEGATRON_LM`` names a Megatron-LM tree of the installed megatron-core 0.19, with its tests. They run
on CPU over gloo, on eight ranks or two.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, TREE
from tests.support.pool import ENVIRONMENT, free_port

# Number of ranks, and how many tests Megatron's own classes pass on them here.
NUM_PASSED = {
    "test_hyper_comm_grid.py": (8, 47),
    "pipeline_parallel/test_bridge_communicator.py": (8, 29),
    "models/mimo/test_mimo_colocated_communicator.py": (8, 24),
    "pipeline_parallel/test_multimodule_communicator.py": (8, 14),
    "pipeline_parallel/test_multimodule_schedules.py": (2, 2),
}
pytestmark = [
    pytest.mark.full,
    pytest.mark.needs("bridges"),
    pytest.mark.skipif(not TREE, reason="VTP_MEGATRON_LM names no tree of Megatron 0.19"),
]


@pytest.mark.parametrize("name", NUM_PASSED)
def test_with_our_bridges(name: str) -> None:
    num_ranks, num_passed = NUM_PASSED[name]
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    launcher.append(f"--master-port={free_port()}")
    # Without their conftest.py, which needs packages to download data with.
    words = ["-m", "pytest", "-p", "nvidia_on_cpu", "-p", "no:cacheprovider", "--noconftest", "-q", "-x"]
    path = os.pathsep.join((TREE, str(ROOT / "tests" / "nvidia"), str(ROOT)))
    done = subprocess.run(
        [*launcher, *words, str(Path("tests") / "unit_tests" / name)],
        cwd=TREE,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "VTP_BRIDGES": "on", "PYTHONDONTWRITEBYTECODE": "1"},
        timeout=900,
        check=False,
        capture_output=True,
        text=True,
    )
    counts = re.findall(r"^(?:=+ )?(\d+) passed", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and counts == [str(num_passed)] * num_ranks, done.stdout[-4000:] + done.stderr[-4000:]
