"""The device that the ranks of tests run on: CPUs, or what ``VTP_TEST_DEVICE`` names; ranks may share one.

    VTP_TEST_DEVICE=cuda pytest tests/multiproc/training/test_training.py

NCCL 2.30 and later let several ranks share a GPU (NCCL_MULTI_RANK_GPU_ENABLE in its manual); older ones end with
"Duplicate GPU detected". So one GPU tries every list. Start NVIDIA's MPS first (``nvidia-cuda-mps-control -d``):
without it ranks take turns, and collectives take 40 times as long. No figure of speed means anything either way.
"""

from __future__ import annotations

import ctypes
import os
import sys

DEVICE = os.environ.get("VTP_TEST_DEVICE", "cpu")
BACKEND = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}[DEVICE]
_SHARING_NCCL = 23000  # 2.30.0, as ncclGetVersion counts
# Each rank's kernels must all find room beside those of the others, or they wait for each other for ever.
SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}


def environment() -> dict[str, str]:
    """Return variables of every rank: no accelerator in sight, or one that may be shared.

    A worker is forked from a process that has asked whether there is a GPU. Only NVML answers that without starting
    CUDA, which no fork survives. Nothing is compiled: each run would wait minutes for it.
    """
    if DEVICE == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    return {**SHARED, "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "TORCH_COMPILE_DISABLE": "1"}


def num_devices(device: str = DEVICE) -> int:
    """Count the devices of this machine."""
    import torch

    if device == "npu":
        import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    return torch.get_device_module(device).device_count()


def device_of(local_rank: int) -> int:
    """Return the device of a local rank; on CPUs each has its own."""
    return local_rank if DEVICE == "cpu" else local_rank % num_devices()


def can_share() -> bool:
    """Tell whether the NCCL that torch loads lets ranks share a GPU; torch itself tells what it was built with."""
    import torch

    if not torch.cuda.is_available():
        return False
    version = ctypes.c_int()
    ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    return version.value >= _SHARING_NCCL


def has_room_for(num_ranks: int, device: str = "cuda") -> bool:
    """Tell whether so many ranks can run here, on a device each or on shared ones."""
    count = num_devices(device)
    return count >= num_ranks or (count > 0 and device == "cuda" and can_share())


def sharing(num_ranks: int, count: int) -> tuple[list[str], dict[str, str]]:
    """Return the words between ``torchrun`` and a script's, and variables, with which ranks share devices.

    Nothing where each has its own.

    >>> sharing(2, 2), sharing(3, 1)[0][:3]
    (([], {}), ['--no-python', 'sh', '-c'])
    """
    if num_ranks <= count:
        return [], {}
    words = ["--no-python", "sh", "-c", f'LOCAL_RANK=$((LOCAL_RANK % {count})) exec "$@"', "rank", sys.executable]
    return words, SHARED
