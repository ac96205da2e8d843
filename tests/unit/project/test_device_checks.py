"""The checks for owners of devices are there, and say why they do not run on this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

from tests.support.hosts import ROOT
from tests.support.pool import ENVIRONMENT


def test_adapters_of_mcore_bridge_are_skipped_with_the_reason() -> None:
    missing = "needs three CUDA devices or NPUs"
    for package, reason in (("transformer_engine", "needs Transformer Engine"), ("mcore_bridge", "needs mcore-bridge")):
        missing = missing if importlib.util.find_spec(package) else reason
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests/device/test_adapters.py"],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 skipped" in done.stdout
    assert re.search(rf"^SKIPPED .*tests/device/test_adapters\.py:\d+: {missing}$", done.stdout, re.MULTILINE), (
        done.stdout
    )
