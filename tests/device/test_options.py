"""Options that need CUDA and Transformer Engine: on stages of 1 and 2 GPUs a script trains as on two of 1.

With NCCL 2.30 or later one GPU is enough: ranks share it.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.devices import has_room_for, num_devices, sharing
from tests.support.hosts import ROOT, example_script

TOLERANCE = 0.01  # of bf16
TOLERANCE_OF_FEW_BITS = 0.03
MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 --log-interval 1 --eval-interval 1000
    --eval-iters 0 --mock-data --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 127
    --make-vocab-size-divisible-by 64 --bf16 --attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization
    --transformer-impl transformer_engine --no-gradient-accumulation-fusion --use-distributed-optimizer
"""
_FUSED, _WHOLE = "fused", "whole"
_LEFT_OUT = {_FUSED: "--no-gradient-accumulation-fusion", _WHOLE: "--use-distributed-optimizer"}  # of MODEL
_ALL_BF16 = """configs:
  plain: {transformer_engine_config_type: "TEQuantizationParams", training_recipe: {}}
matchers:
  all: {type: "glob", enabled: true, pattern: "*", config: "plain"}
"""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not has_room_for(3), reason="needs three CUDA devices, or one and NCCL 2.30"),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine"),
]


def _needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"needs {package}")


@pytest.mark.parametrize(
    "flags",
    [
        ["--transformer-impl", "transformer_engine"],
        # So low that every step clips.
        ["--qk-clip", "--qk-clip-threshold", "0.001", _WHOLE],
        ["--log-max-attention-logit"],
        ["--fine-grained-activation-offloading", "--offload-modules", "core_attn"],
        ["--moe-grouped-gemm", "--num-experts", "4", "--disable-bias-linear", "--sequence-parallel"],
        ["--optimizer-cpu-offload", "--use-precision-aware-optimizer"],
        pytest.param(
            ["--defer-embedding-wgrad-compute", "--untie-embeddings-and-output-weights", _FUSED],
            marks=_needs("fused_weight_gradient_mlp_cuda"),
        ),
    ],
    ids=lambda flags: flags[0],
)
def test_option_that_needs_transformer_engine(flags: list[str]) -> None:
    _assert_same("1,2", flags, TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "capability"),
    [
        (["--fp8-format", "hybrid", "--fp8-recipe", "delayed"], (8, 9)),
        (["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-param-gather"], (8, 9)),
        (["--fp4-format", "e2m1"], (10, 0)),
        (["--fp4-format", "e2m1", "--fp4-param-gather"], (10, 0)),
    ],
    ids=["fp8", "fp8-gathered", "fp4", "fp4-gathered"],
)
def test_weights_of_few_bits(flags: list[str], capability: tuple[int, int]) -> None:
    """Losses are near those of equal stages, and not those of a run with more bits."""
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}")
    losses = _assert_same("1,2", flags, TOLERANCE_OF_FEW_BITS)
    assert losses != _losses("1,2", []), "the flags change nothing"


def test_precision_of_single_layers(tmp_path: Path) -> None:
    """A file that leaves all layers in bf16 undoes 8 bits, on stages of different sizes, too."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability (8, 9)")
    (tmp_path / "layers.yaml").write_text(_ALL_BF16)
    flags = ["--fp8-format", "hybrid", "--te-precision-config-file", str(tmp_path / "layers.yaml")]
    losses = _assert_same("1,2", flags, TOLERANCE)
    assert losses != _losses("1,2", flags[:2]), "the file changes nothing"


@pytest.mark.skipif(not shutil.which("ft_launcher"), reason="needs nvidia-resiliency-ext 0.6")
def test_monitored_ranks(tmp_path: Path) -> None:
    flags = ["--enable-ft-package", "--save", str(tmp_path)]
    losses = _losses("1,2", flags, launcher=["ft_launcher", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29650"])
    assert losses == _losses("1,2", [])


def _assert_same(sizes: str, flags: list[str], tolerance: float) -> list[float]:
    losses, wanted = _losses(sizes, flags), _losses("1,1", flags)
    assert len(losses) == len(wanted) == 5
    assert all(math.isclose(*pair, rel_tol=tolerance) for pair in zip(losses, wanted, strict=True)), (losses, wanted)
    return losses


def _losses(sizes: str, flags: list[str], launcher: Sequence[str] = ()) -> list[float]:
    num_ranks = sum(map(int, sizes.split(",")))
    launcher = launcher or [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    shared, variables = sharing(num_ranks, num_devices("cuda"))
    command = [*launcher, f"--nproc-per-node={num_ranks}", *shared]
    left_out = {_LEFT_OUT[flag] for flag in flags if flag in _LEFT_OUT}
    model = [flag for flag in MODEL.split() if flag not in left_out]
    command += ["-m", "vtp_plugin", "run", example_script(), "--vtp-size-list", sizes, *model]
    command += [flag for flag in flags if flag not in _LEFT_OUT]
    environment = {
        **os.environ,
        **variables,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_CPU_OFFLOAD_V1": "1",
    }
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", process.stdout)]
