"""Finds the device of this process, and with it the backend of torch.distributed: nccl, hccl or gloo."""

from __future__ import annotations

import logging
from typing import Final, Literal, get_args

from vtp_plugin.config.flag import DeviceName
from vtp_plugin.errors import ConfigError
from vtp_plugin.platform.cpu import CpuPlatform, probe_cuda, probe_npu, refusal, working_accelerator
from vtp_plugin.platform.interface import CudaPlatform, NpuPlatform, Platform

# npu first: with torch_npu's transfer_to_npu, torch.cuda answers for the NPU.
_ACCELERATORS: Final = {"npu": (probe_npu, NpuPlatform), "cuda": (probe_cuda, CudaPlatform)}


def detect(requested: DeviceName = "auto") -> Platform:
    """Return the platform of this process: npu if one works, else cuda, else cpu.

    It changes nothing: call :meth:`Platform.install` on the result before Megatron touches the device.

    Args:
        requested: The platform to use, or "auto".

    Raises:
        ConfigError: The requested platform does not exist here, or is "cpu" beside a working accelerator.
    """
    if requested not in get_args(DeviceName):
        raise ConfigError(f"platform {requested}: unknown; choose one of {', '.join(get_args(DeviceName))}")
    platform = _detect_any() if requested == "auto" else _detect_requested(requested)
    logging.getLogger(__name__).debug("platform %s: %s", platform.name, platform.reason)
    return platform


def _detect_any() -> Platform:
    reasons: list[str] = []
    for probe, platform in _ACCELERATORS.values():
        works, reason = probe()
        if works:
            return platform(reason)
        reasons.append(reason)
    return CpuPlatform(f"no accelerator: {', '.join(reasons)}")


def _detect_requested(requested: Literal["cuda", "npu", "cpu"]) -> Platform:
    if requested == "cpu":
        if (accelerator := working_accelerator()) is not None:
            raise ConfigError(refusal(accelerator))
        return CpuPlatform("requested")
    probe, platform = _ACCELERATORS[requested]
    works, reason = probe()
    if not works:
        raise ConfigError(f"platform {requested}: no such device here, {reason}; use platform auto or cpu")
    return platform(f"requested, {reason}")
