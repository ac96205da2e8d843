"""The device under the training run: NVIDIA (NCCL), Ascend (HCCL) or the host itself (gloo)."""

from __future__ import annotations

import logging
from typing import Final, Literal

from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.base import Platform
from vtp_plugin.platform.cpu import CpuPlatform, refusal
from vtp_plugin.platform.cuda import CudaPlatform
from vtp_plugin.platform.npu import NpuPlatform
from vtp_plugin.platform.probe import probe_cuda, probe_npu, working_accelerator

__all__ = ["Platform", "Requested", "detect"]

Requested = Literal["auto", "cuda", "npu", "cpu"]

_REQUESTS: Final = ("auto", "cuda", "npu", "cpu")


def detect(requested: Requested = "auto") -> Platform:
    """Return the platform of this process: npu if one works, else cuda, else cpu.

    Nothing is changed: call :meth:`Platform.install` on the result before Megatron touches the device.

    Args:
        requested: A platform that must be used, or "auto".

    Raises:
        ConfigError: The requested platform does not exist here, or is "cpu" beside a working accelerator.
    """
    if requested not in _REQUESTS:
        raise ConfigError(f"platform {requested}: unknown; choose one of {', '.join(_REQUESTS)}")
    platform = _detect_any() if requested == "auto" else _detect_requested(requested)
    logging.getLogger(__name__).debug("platform %s: %s", platform.name, platform.reason)
    return platform


def _detect_any() -> Platform:
    # npu first: with torch_npu's transfer_to_npu, torch.cuda answers for the NPU.
    has_npu, npu_reason = probe_npu()
    if has_npu:
        return NpuPlatform(npu_reason)
    has_cuda, cuda_reason = probe_cuda()
    if has_cuda:
        return CudaPlatform(cuda_reason)
    return CpuPlatform(f"no accelerator: {npu_reason}, {cuda_reason}")


def _detect_requested(requested: Literal["cuda", "npu", "cpu"]) -> Platform:
    if requested == "cpu":
        if (accelerator := working_accelerator()) is not None:
            raise ConfigError(refusal(accelerator))
        return CpuPlatform("requested")
    works, reason = probe_npu() if requested == "npu" else probe_cuda()
    if not works:
        raise ConfigError(f"platform {requested}: no such device here, {reason}; use platform auto or cpu")
    return NpuPlatform(f"requested, {reason}") if requested == "npu" else CudaPlatform(f"requested, {reason}")
