"""The CPU platform: unmodified Megatron trains on the host, over gloo.

Megatron-Core has no CPU path: it calls ``torch.cuda`` in several hundred places. :meth:`CpuPlatform.install` maps what
it calls onto the CPU, and :meth:`CpuPlatform.uninstall` puts every attribute back. ``torch.distributed`` stays as it
is: the caller chooses the backend.
"""

from __future__ import annotations

import os
import platform
from contextlib import AbstractContextManager

import torch
import torch._dynamo.trace_rules
import torch.compiler

from vtp_plugin.errors import ConfigError, PatchError
from vtp_plugin.platform.cpu_device import CpuDevice, map_torch_cuda
from vtp_plugin.platform.cpu_random import map_computing
from vtp_plugin.platform.cpu_tensors import map_tensors
from vtp_plugin.platform.find_device import is_cpu_mapping_installed, working_accelerator
from vtp_plugin.platform.interface import BackendName, Platform, PlatformName
from vtp_plugin.util.undo import UndoStack


class CpuPlatform(Platform):
    """Training on the host with gloo; see :class:`vtp_plugin.platform.interface.Platform`."""

    name: PlatformName = "cpu"
    backend: BackendName = "gloo"
    host_blocking_wait = True
    gathers_by_messages = True
    orders_by_peer = True

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self._undo = UndoStack()
        self._device = CpuDevice()
        self._compiler_stance: AbstractContextManager[None] | None = None

    @property
    def is_installed(self) -> bool:
        """Whether this object has mapped ``torch.cuda`` onto the CPU."""
        return len(self._undo) > 0

    def device(self) -> torch.device:
        """Return the CPU."""
        return torch.device("cpu")

    def memory_bytes(self) -> int:
        """Return how much memory the host has."""
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int | None:
        """Return None: torch does not count what tensors have of the memory of a machine."""
        return None

    def card_name(self) -> str:
        """Return what the host's processor is called."""
        return platform.processor() or platform.machine()

    def device_random(self) -> AbstractContextManager[None]:
        """Return a context in which dropout and in-place initialisers draw from the device's generator.

        They take no ``device`` argument, so outside of modules the mapping cannot know that Megatron means the device.
        Use the context around code that draws "on the device" while the CPU's generator must not advance. Nesting does
        nothing.
        """
        return self._device.generator.as_default()

    def host_random(self) -> AbstractContextManager[None]:
        """Return a context in which the CPU's default generator is the host's, also where modules compute."""
        return self._device.generator.host_as_default()

    def install(self) -> None:
        """Map ``torch.cuda`` onto the CPU, for the whole process. A second call does nothing.

        From now on functions under ``torch.compile`` run uncompiled, also those compiled before.

        Raises:
            ConfigError: An accelerator works on this machine.
            PatchError: Another object has installed the mapping.
        """
        if self.is_installed:
            return
        if is_cpu_mapping_installed():
            raise PatchError("platform cpu: torch.cuda is mapped by another CpuPlatform already; uninstall that first")
        if (accelerator := working_accelerator()) is not None:
            raise ConfigError(refusal(accelerator))
        stance = torch.compiler.set_stance("force_eager")
        try:
            map_torch_cuda(self._undo, self._device)
            map_tensors(self._undo, self._device.generator)
            map_computing(self._undo, self._device.generator)
        except BaseException:
            self._undo.undo()
            stance.__exit__(None, None, None)
            raise
        self._compiler_stance = stance

    def uninstall(self) -> None:
        """Put every attribute and the compiler's stance back."""
        self._undo.undo()
        if self._compiler_stance is not None:
            self._compiler_stance.__exit__(None, None, None)
            self._compiler_stance = None
            # torch._dynamo has cached torch's functions by identity while the replacements stood there.
            torch._dynamo.trace_rules.clear_lru_cache()


def refusal(accelerator: str) -> str:
    """Return the error text for a CPU run beside a working accelerator ("cuda" or "npu")."""
    variable = "ASCEND_RT_VISIBLE_DEVICES" if accelerator == "npu" else "CUDA_VISIBLE_DEVICES"
    return (
        f"platform cpu: this machine has a working accelerator ({accelerator}), which the CPU cannot stand in for; "
        f'hide it with {variable}="", or use --vtp-device {accelerator}'
    )
