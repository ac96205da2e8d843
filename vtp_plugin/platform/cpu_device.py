"""What ``torch.cuda`` answers while the CPU stands in for it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import torch
import torch.cuda.profiler

from vtp_plugin.platform.cpu_random import DefaultGenerators, DeviceGenerator
from vtp_plugin.platform.cpu_streams import CpuEvent, CpuStream, StreamState
from vtp_plugin.util.undo import UndoStack

# Up to capability 9 Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1, which means nothing on a CPU.
_CAPABILITY: Final = (10, 0)

_NOTHING_TO_DO: Final = [
    "check_error", "empty_cache", "init", "ipc_collect", "reset_accumulated_memory_stats",
    "reset_max_memory_allocated", "reset_max_memory_cached", "reset_peak_memory_stats", "set_device",
    "set_per_process_memory_fraction", "synchronize", "_lazy_init", "_sleep",
]  # fmt: skip
_ZERO: Final = [
    "clock_rate", "current_device", "device_memory_used", "max_memory_allocated", "max_memory_cached",
    "max_memory_reserved", "memory_allocated", "memory_cached", "memory_reserved", "memory_usage", "power_draw",
    "temperature", "utilization",
]  # fmt: skip
_ANSWERS: Final[dict[str, object]] = {
    "is_initialized": True,  # so that torch runs what it would queue until the driver is up
    "device_count": 1,  # 0 would make Megatron skip its parallel groups
    "get_device_capability": _CAPABILITY,
    "get_device_name": "cpu",
    "memory_summary": "no device memory: the CPU stands in for CUDA",
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    # True in a fork of a process that has asked for a driver; torch.manual_seed() would leave the device out.
    "_is_in_bad_fork": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    """The part of ``torch.cuda.get_device_properties()`` that Megatron reads."""

    name: str = "cpu"
    major: int = _CAPABILITY[0]
    minor: int = _CAPABILITY[1]
    total_memory: int  # bytes
    multi_processor_count: int


class CpuDevice:
    """One simulated CUDA device: always there, idle, with the host's memory.

    Its methods replace the functions of ``torch.cuda`` that have the same name and take the same arguments.
    """

    def __init__(self) -> None:
        self.generator = DeviceGenerator()
        self._streams = StreamState()

    @staticmethod
    def _memory_bytes(pages: str) -> int:
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")

    def is_available(self) -> bool:
        """Return True: Megatron refuses to start otherwise."""
        return True

    def get_device_properties(self, device: object = None) -> DeviceProperties:
        """Return the host's memory and cores."""
        return DeviceProperties(
            total_memory=self._memory_bytes("SC_PHYS_PAGES"), multi_processor_count=os.cpu_count() or 1
        )

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return the host's free and total memory in bytes."""
        return self._memory_bytes("SC_AVPHYS_PAGES"), self._memory_bytes("SC_PHYS_PAGES")

    def torch_cuda_attributes(self) -> dict[str, object]:
        """Return the replacements for ``torch.cuda``, by name."""
        generator, streams = self.generator, self._streams
        methods = (
            self.is_available, self.get_device_properties, self.mem_get_info, streams.current_stream,
            streams.default_stream, streams.set_stream, streams.stream, generator.get_rng_state,
            generator.get_rng_state_all, generator.set_rng_state, generator.set_rng_state_all, generator.manual_seed,
            generator.seed, generator.initial_seed,
        )  # fmt: skip
        return {
            **{method.__name__: method for method in methods},
            **{name: _returning(None) for name in _NOTHING_TO_DO},
            **{name: _returning(0) for name in _ZERO},
            **{name: _returning(answer) for name, answer in _ANSWERS.items()},
            "memory_stats": lambda device=None: defaultdict[str, int](int),  # 0, whatever the key
            "memory_snapshot": lambda *args, **kwargs: [],
            "cudart": lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0),
            "manual_seed_all": lambda seed: generator.manual_seed(seed),
            "seed_all": lambda: generator.seed(),
            "default_generators": DefaultGenerators(generator),
            "device": nullcontext,
            "device_of": lambda tensor: nullcontext(),
            "Event": CpuEvent,
            "Stream": CpuStream,
        }


def map_torch_cuda(undo: UndoStack, device: CpuDevice) -> None:
    """Let what Megatron calls on ``torch.cuda`` act on a stand-in device; ``undo`` receives every replacement."""
    # torch.cuda takes these functions from its submodules, which call each other there.
    submodules = (torch.cuda.random, torch.cuda.memory, torch.cuda.streams)
    for name, replacement in device.torch_cuda_attributes().items():
        original = vars(torch.cuda).get(name)
        if original is None:
            continue  # a function of another torch version
        for module in submodules:
            if vars(module).get(name) is original:
                undo.set(module, name, replacement)
        undo.set(torch.cuda, name, replacement)
    for name in ("start", "stop"):
        undo.set(torch.cuda.profiler, name, _returning(None))
    # torch's CPU build raises on the profiler's ranges.
    for name, answer in {"range_push": 0, "range_pop": 0, "range_start": 0, "range_end": None, "mark": None}.items():
        undo.set(torch.cuda.nvtx, name, _returning(answer))
    undo.set(torch.cuda.nvtx, "range", _nvtx_range)
    # A CUDA build reports an accelerator even without a driver, and torch would then open streams on it (seen in
    # optimizers, in torch._dynamo and in a DataLoader that pins memory).
    undo.set(torch._C, "_accelerator_getAccelerator", _returning(None))


@contextmanager
def _nvtx_range(msg: str, *args: object, **kwargs: object) -> Generator[None]:
    yield


def _returning(value: object) -> Callable[..., Any]:
    """Return a new function that takes anything and returns ``value``.

    Each name needs a function of its own: when torch._dynamo first compiles something, it collects torch's functions by
    name, and raises if it finds one function under two names that it treats differently.
    """

    def stand_in(*args: object, **kwargs: object) -> object:
        return value

    return stand_in
