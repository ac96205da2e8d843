"""Options that need CUDA and Transformer Engine: on stages of 1 and 2 GPUs a script trains as on two of 1.

Nobody of us has three GPUs: these tests have not been run.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.hosts import ROOT, example_script

TOLERANCE = 0.01  # of bf16
_MODEL = """
    --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 1e-3 --log-interval 1 --eval-iters 0 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 64 --bf16 --attention-dropout 0
    --hidden-dropout 0 --use-cpu-initialization --transformer-impl transformer_engine --no-gradient-accumulation-fusion
"""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs three CUDA devices"),
    pytest.mark.skipif(not importlib.util.find_spec("transformer_engine"), reason="needs Transformer Engine"),
]


@pytest.mark.parametrize(
    "flags",
    [
        # So low that every step clips.
        ["--qk-clip", "--qk-clip-threshold", "0.001"],
        ["--log-max-attention-logit"],
        ["--fine-grained-activation-offloading", "--offload-modules", "core_attn"],
    ],
    ids=lambda flags: flags[0],
)
def test_option_that_needs_transformer_engine(flags: list[str]) -> None:
    losses, wanted = _losses("1,2", flags), _losses("1,1", flags)
    assert len(losses) == len(wanted) == 5
    assert all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(losses, wanted, strict=True)), (losses, wanted)


def _losses(sizes: str, flags: list[str]) -> list[float]:
    num_ranks = sum(map(int, sizes.split(",")))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command += ["-m", "vtp_plugin", "run", example_script(), "--vtp-size-list", sizes, *_MODEL.split(), *flags]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVTE_CPU_OFFLOAD_V1": "1",
    }
    process = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", process.stdout)]
