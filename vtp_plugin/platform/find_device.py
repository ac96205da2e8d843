"""Find out which accelerator works on this machine, without raising."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Literal

import torch

from vtp_plugin.platform.cpu_device import CpuDevice


def is_cpu_mapping_installed() -> bool:
    """Tell whether ``torch.cuda`` stands for the CPU; what it says about devices then means nothing."""
    return isinstance(getattr(torch.cuda.is_available, "__self__", None), CpuDevice)


def probe_npu() -> tuple[bool, str]:
    """Return whether an NPU works, and why (not), importing ``torch_npu`` if it is installed.

    The import of torch_npu can fail for many reasons: missing CANN libraries, a torch of another version, a CUDA device
    in the machine. So every exception means "no NPU here".
    """
    if not hasattr(torch, "npu"):
        if importlib.util.find_spec("torch_npu") is None:
            return False, "torch_npu is not installed"
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            return False, f"torch_npu does not import: {_first_line(error)}"
    module = getattr(torch, "npu", None)
    try:
        if module is not None and module.is_available():
            return True, f"torch.npu sees {module.device_count()} device(s)"
    except Exception as error:
        return False, f"torch.npu fails: {_first_line(error)}"
    return False, "torch.npu sees no device"


def probe_cuda() -> tuple[bool, str]:
    """Return whether a CUDA device works, and why (not)."""
    if is_cpu_mapping_installed():
        return False, "torch.cuda is mapped onto the CPU"
    if torch.cuda.is_available():
        return True, f"torch.cuda sees {torch.cuda.device_count()} device(s)"
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return False, "this torch is built without CUDA"
    return False, "torch.cuda sees no device"


def working_accelerator() -> Literal["npu", "cuda"] | None:
    """Return the accelerator that works, npu before cuda: torch_npu may answer for ``torch.cuda`` too."""
    if probe_npu()[0]:
        return "npu"
    return "cuda" if probe_cuda()[0] else None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
