"""MindSpeed-MM's own script, on CPU over gloo: stages of unequal size train Qwen2.5-VL as one rank does.

Opt-in: ``VTP_MINDSPEED_MM`` names a tree of MindSpeed-MM 26.1.0, ``VTP_MINDSPEED`` and ``VTP_MEGATRON_LM`` those that
it is made for. ``tests/npu_stub`` and ``tests/mindspeed/mm`` stand for what only an NPU has, and for the data set. The
oracle is one rank of the unmodified script, without the plugin; all runs start from one set of weights.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import ROOT
from tests.mindspeed.launcher import launch
from tests.mindspeed.mm.model import FLAGS, TEXT_LAYERS, VISION_LAYERS, write_files

TREES = {name: os.environ.get(name, "") for name in ("VTP_MINDSPEED_MM", "VTP_MINDSPEED", "VTP_MEGATRON_LM")}
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not all(TREES.values()), reason=f"no path in {' and '.join(name for name, path in TREES.items() if not path)}"
    ),
]
SCRIPT = ROOT / "tests" / "mindspeed" / "mm" / "pretrain.py"
TIMEOUT_S = 900.0
STEPS = 5
_NUMBERS = re.compile(r"exact loss: ([\d.E+-]+|nan) \| exact norm: ([\d.E+-]+)")
Numbers = dict[str, list[float]]


def start(
    ranks: int, vision: Sequence[Any], text: Sequence[Any], *extra: str, is_run: bool = False, dp: int = 1
) -> tuple[int, str]:
    """Start the script and return how it ended and what it wrote.

    Args:
        ranks: processes.
        vision: layers of the vision tower, per stage.
        text: layers of the language model, per stage.
        extra: flags besides the common ones.
        is_run: start it by ``python -m vtp_plugin run``, else without the plugin.
        dp: replicas of every stage.
    """
    files = write_files(Path(tempfile.mkdtemp()), vision, text, is_bf16="--bf16" in extra)
    words = [*FLAGS, *files, "--global-batch-size", str(4 * dp), *extra]
    # MindSpeed calls make, which asks python3-config where the headers of this Python lie.
    tools = [str(Path(sys.executable).parent), sysconfig.get_path("scripts"), f"{sys.base_prefix}/bin"]
    environment = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "npu_stub"), *reversed(TREES.values())]),
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    return launch(SCRIPT, words, num_ranks=ranks, is_run=is_run, environment=environment, timeout_s=TIMEOUT_S)


def trained(*arguments: object, **options: object) -> Numbers:
    """Train as :func:`start` says, and return losses and norms, step by step."""
    code, output = start(*arguments, **options)  # pyright: ignore[reportArgumentType]
    assert code == 0, output[-6000:]
    found = [(float(loss), float(norm)) for loss, norm in _NUMBERS.findall(output)]
    assert len(found) == STEPS, output[-6000:]
    return {"losses": [loss for loss, _ in found], "norms": [norm for _, norm in found]}


@functools.cache
def oracle(*extra: str, dp: int = 1) -> Numbers:
    """One rank per replica, without the plugin; each is run once."""
    return trained(dp, [VISION_LAYERS], [TEXT_LAYERS], *extra, dp=dp)


def assert_equal(found: Numbers, expected: Numbers, tolerance: float = 1e-5) -> None:
    """Compare losses and norms of all steps."""
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=tolerance), name


def test_the_oracle_trains() -> None:
    found = oracle()
    assert found["losses"][-1] < found["losses"][0]
    assert all(norm > 1.0 for norm in found["norms"])


def test_its_own_tensor_parallelism_equals_the_oracle() -> None:
    assert_equal(trained(2, [VISION_LAYERS], [TEXT_LAYERS], "--tensor-model-parallel-size", "2"), oracle())


def test_its_own_pipeline_equals_the_oracle() -> None:
    assert_equal(trained(2, [VISION_LAYERS, 0], [2, 2], "--pipeline-model-parallel-size", "2"), oracle())
