"""CPUs in the place of a GPU: device, tensors, streams, random states.

The random generator of the simulated device.

A real accelerator has a second generator: what Megatron draws "on the device" before the weights does not advance the
CPU's generator, so ``--use-cpu-initialization`` gives the same weights for every TP size. And what only some ranks of a
stage draw on the host, such as the seeds of a data loader, does not advance the device's, so that dropout leaves out
the same elements on all of them. The CPU platform keeps both properties with a second generator, too.

Tensor factories and tensor methods that understand ``device="cuda"`` on a machine without CUDA.

Each function is wrapped where Megatron looks it up (``torch.zeros``, ``torch.Tensor.to``). A ``TorchFunctionMode``
would slow down every torch call and hold for one thread only, and another thread runs Megatron's backward functions.

The CPU platform: unmodified Megatron trains on the host, over gloo.

Megatron-Core has no CPU path: it calls ``torch.cuda`` in several hundred places. :meth:`CpuPlatform.install` maps what
it calls onto the CPU, and :meth:`CpuPlatform.uninstall` puts every attribute back. ``torch.distributed`` stays as it
is: the caller chooses the backend.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace, TracebackType
from typing import Any, Final, Literal

import torch
import torch._dynamo.trace_rules
import torch.amp.autocast_mode
import torch.compiler
import torch.cuda.profiler
import torch.utils._device
import torch.utils.checkpoint

from vtp_plugin.errors import ConfigError, PatchError
from vtp_plugin.platform.interface import BackendName, Platform, PlatformName
from vtp_plugin.util.undo import UndoStack


class DeviceGenerator:
    """The generator that ``torch.cuda``'s random functions act on while the CPU mapping is installed.

    Functions that take ``generator=`` draw from :attr:`current` directly. In-place initialisers and dropout take none:
    run them inside :meth:`as_default` to draw them from the device's stream as well.

    Attributes:
        is_default: inside :meth:`as_default`.
    """

    def __init__(self) -> None:
        self._other = torch.Generator(device="cpu")
        self.is_default = False

    @property
    def current(self) -> torch.Generator:
        """The generator with the device's state: a separate one, or inside :meth:`as_default` the CPU's default one."""
        return torch.default_generator if self.is_default else self._other

    def as_default(self) -> AbstractContextManager[None]:
        """Let random operations without a ``generator=`` argument draw from the device's stream.

        Meanwhile the device's state replaces that of the CPU's default generator, which comes back afterwards. Nesting
        does nothing, but in a :meth:`host_as_default`. Not safe if other threads draw random numbers.
        """
        return self._switched(is_default=True)

    def host_as_default(self) -> AbstractContextManager[None]:
        """Let random operations draw from the host's stream, as they do outside :meth:`as_default`."""
        return self._switched(is_default=False)

    @contextmanager
    def _switched(self, *, is_default: bool) -> Generator[None]:
        if is_default == self.is_default:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        state = torch.default_generator.get_state()
        torch.default_generator.set_state(self._other.get_state())
        self._other.set_state(state)
        self.is_default = not self.is_default

    # Names and arguments follow torch.cuda.random. There is one device, so the device argument is ignored.

    def get_rng_state(self, device: object = "cuda") -> torch.Tensor:
        """Return a copy of the device generator's state, a byte tensor on the CPU."""
        return self.current.get_state()

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """Return the states of all devices: there is one."""
        return [self.current.get_state()]

    def set_rng_state(self, new_state: torch.Tensor, device: object = "cuda") -> None:
        """Set the device generator's state."""
        self.current.set_state(new_state)

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the states of all devices: there is one, which takes the first."""
        self.current.set_state(new_states[0])

    def manual_seed(self, seed: int) -> None:
        """Seed the device generator."""
        self.current.manual_seed(int(seed))

    def seed(self) -> None:
        """Seed the device generator from the system's entropy."""
        self.current.seed()

    def initial_seed(self) -> int:
        """Return the last seed of the device generator."""
        return self.current.initial_seed()


class DefaultGenerators:
    """Stands for ``torch.cuda.default_generators``: a sequence with the generator of the only device."""

    def __init__(self, device_generator: DeviceGenerator) -> None:
        self._device_generator = device_generator

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Generator:
        if index not in (0, -1):
            raise IndexError(f"device {index}: the CPU platform has one device")
        return self._device_generator.current


def map_computing(undo: UndoStack, device_generator: DeviceGenerator) -> None:
    """Let what modules compute, forward and backward, draw from the device's generator.

    A data loader draws outside of modules, so from the host's. A backward pass draws where it computes a forward again.
    Torch's checkpoints restore the state of the default generator then, so it must be the device's when they note it.

    Args:
        undo: Receives every replacement.
        device_generator: Random generator of the simulated device.
    """
    variable: Any = torch.autograd.Variable  # torch's types leave out its engine
    undo.set(torch.nn.Module, "__call__", _on_device(torch.nn.Module.__call__, device_generator))
    undo.set(variable, "_execution_engine", _Engine(variable._execution_engine, device_generator))
    undo.set(torch.utils.checkpoint, "checkpoint", _on_device(torch.utils.checkpoint.checkpoint, device_generator))


def _on_device(function: Callable[..., Any], device_generator: DeviceGenerator) -> Callable[..., Any]:
    @functools.wraps(function)
    def computing(*args: Any, **kwargs: Any) -> Any:
        if device_generator.is_default:
            return function(*args, **kwargs)
        with device_generator.as_default():
            return function(*args, **kwargs)

    return computing


class _Engine:
    """Stands for torch's engine, by which each backward pass of torch and Megatron runs."""

    def __init__(self, engine: Any, device_generator: DeviceGenerator) -> None:
        self.run_backward = _on_device(engine.run_backward, device_generator)
        self.queue_callback = engine.queue_callback
        self.is_checkpoint_valid = engine.is_checkpoint_valid


class CpuEvent:
    """Stands for ``torch.cuda.Event``: it is complete as soon as it is recorded, with the time of the host."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._recorded_at_s: float | None = None

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._recorded_at_s = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Return at once: what precedes the event has run."""

    def synchronize(self) -> None:
        """Return at once: what precedes the event has run."""

    def query(self) -> bool:
        """Return True: what precedes the event has run."""
        return True

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            RuntimeError: One of the two was never recorded.
        """
        if self._recorded_at_s is None or end_event._recorded_at_s is None:
            raise RuntimeError("both events must be recorded before their elapsed time is taken")
        return (end_event._recorded_at_s - self._recorded_at_s) * 1e3


class CpuStream:
    """Stands for ``torch.cuda.Stream``: its work is done when the call returns."""

    def __init__(self, device: object = None, priority: int = 0, **_kwargs: object) -> None:
        self.device = torch.device("cpu")
        self.device_index = 0
        self.priority = priority
        self.cuda_stream = 0
        self.stream_id = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the lowest and the highest priority: there is one."""
        return (0, 0)

    def wait_event(self, event: object) -> None:
        """Return at once: the event has been reached."""

    def wait_stream(self, stream: object) -> None:
        """Return at once: the other stream is idle."""

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Record ``event``, or a new one, and return it."""
        event = event if event is not None else CpuEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Return at once: the stream is idle."""

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True


class StreamState:
    """Keeps the current stream: ``current_stream()`` returns what ``set_stream()`` was given."""

    def __init__(self) -> None:
        self._default = CpuStream()
        self._current = self._default

    def current_stream(self, device: object = None) -> CpuStream:
        """Return the current stream."""
        return self._current

    def default_stream(self, device: object = None) -> CpuStream:
        """Return the default stream."""
        return self._default

    def set_stream(self, stream: CpuStream | None) -> None:
        """Make ``stream`` the current one; None changes nothing."""
        if stream is not None:
            self._current = stream

    def stream(self, stream: CpuStream | None) -> StreamContext:
        """Return a context in which ``stream`` is the current one."""
        return StreamContext(self, stream)


class StreamContext:
    """Stands for ``torch.cuda.stream(...)``: a context manager that may be entered several times."""

    def __init__(self, state: StreamState, stream: CpuStream | None) -> None:
        self._state = state
        self._stream = stream
        self._outer: list[CpuStream] = []

    def __enter__(self) -> None:
        self._outer.append(self._state.current_stream())
        self._state.set_stream(self._stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.set_stream(self._outer.pop())


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


_CPU: Final = torch.device("cpu")
_STANDS_FOR: Final = ("cuda", "npu")

_FACTORIES: Final = [
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "ones", "ones_like", "sparse_coo_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
]  # fmt: skip
_RANDOM_FACTORIES: Final = ["normal", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"]
_TENSOR_FACTORIES: Final = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]


def is_cuda_device(device: object) -> bool:
    """Tell whether ``device`` names a CUDA device in any form that torch accepts, a bare index included.

    Code for Ascend says "npu" where other code says "cuda", and torch does not know that name without torch_npu.

    >>> [is_cuda_device(device) for device in ("cuda", "cuda:1", 0, torch.device("cuda", 0), "npu:0")]
    [True, True, True, True, True]
    >>> [is_cuda_device(device) for device in (None, "cpu", "meta", torch.device("cpu"), torch.float32, True)]
    [False, False, False, False, False, False]
    """
    if isinstance(device, torch.device):
        return device.type in _STANDS_FOR
    if isinstance(device, str):
        return device.partition(":")[0] in _STANDS_FOR
    return type(device) is int  # not isinstance: True is no index


def cpu_device(device: Any) -> Any:
    """Return the CPU device for a CUDA device, and anything else unchanged."""
    return _CPU if is_cuda_device(device) else device


def map_tensors(undo: UndoStack, device_generator: DeviceGenerator) -> None:
    """Wrap torch's tensor factories, tensor methods, device contexts and autocast.

    Args:
        undo: Receives every replacement.
        device_generator: Random factories draw from it if they are called with a CUDA device.
    """
    # torch caches this list of its factories at first use. Filled later, it would keep the wrappers even after they are
    # removed, and `with torch.device("meta")` would build real tensors.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        undo.set(torch, name, _factory_on_cpu(getattr(torch, name)))
    for name in _RANDOM_FACTORIES:
        undo.set(torch, name, _factory_on_cpu(getattr(torch, name), device_generator))
    for name in _TENSOR_FACTORIES:
        undo.set(torch.Tensor, name, _factory_on_cpu(getattr(torch.Tensor, name)))
    undo.set(torch.Tensor, "to", _to_on_cpu(torch.Tensor.to))
    # Module.to() parses its arguments in C++, where torch's CPU build refuses a bare index.
    undo.set(torch.nn.Module, "to", _to_on_cpu(torch.nn.Module.to))
    undo.set(torch.Tensor, "type", _type_as_if_on_cuda(torch.Tensor.type))
    for name in ("cuda", "pin_memory"):
        undo.set(torch.Tensor, name, _idle(getattr(torch.Tensor, name), returns_self=True))
    undo.set(torch.Tensor, "record_stream", _idle(torch.Tensor.record_stream, returns_self=False))
    _map_contexts(undo)


def _map_contexts(undo: UndoStack) -> None:
    """Let ``with torch.device("cuda")`` and ``torch.autocast("cuda")`` act on the CPU."""
    context = torch.utils._device.DeviceContext
    undo.set(context, "__init__", _first_argument_on_cpu(context.__init__, cpu_device))
    autocast = torch.amp.autocast_mode.autocast
    undo.set(autocast, "__init__", _first_argument_on_cpu(autocast.__init__, _cpu_device_type))
    # custom_fwd and custom_bwd ask whether autocast was on for "cuda"; they must see the CPU's answer.
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        undo.set(torch, name, _autocast_query_on_cpu(getattr(torch, name)))


def _cpu_device_type(device_type: str) -> str:
    return "cpu" if device_type in _STANDS_FOR else device_type


def _redirect(kwargs: dict[str, Any]) -> bool:
    """Point the keyword arguments of a factory at the CPU; return whether they named a CUDA device."""
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False  # pinning asks for a driver
    on_cuda = is_cuda_device(kwargs.get("device"))
    if on_cuda:
        kwargs["device"] = _CPU
    return on_cuda


def _factory_on_cpu(function: Callable[..., Any], generator: DeviceGenerator | None = None) -> Callable[..., Any]:
    """Let a factory make CPU tensors for a CUDA device; a random one then draws from the device's generator."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _redirect(kwargs) or generator is None:
            return function(*args, **kwargs)
        # Not `generator=`: the *_like functions of older torch do not take it.
        with generator.as_default():
            return function(*args, **kwargs)

    return wrapper


def _to_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = (_CPU, *args[1:])
        elif is_cuda_device(kwargs.get("device")):
            kwargs["device"] = _CPU
        return function(self, *args, **kwargs)

    return to


def _type_as_if_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Report ``torch.cuda.FloatTensor`` for a CPU tensor: Megatron's optimizer sorts parameters by this string."""

    @functools.wraps(function)
    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name: str = function(self)
            is_plain = self.device.type == "cpu" and name.count(".") == 1
            return name.replace("torch.", "torch.cuda.", 1) if is_plain else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        elif getattr(dtype, "__module__", None) == "torch.cuda":
            dtype = f"torch.{dtype.__name__}"
        return function(self, dtype, *args, **kwargs)

    return tensor_type


def _idle(function: Callable[..., Any], *, returns_self: bool) -> Callable[..., Any]:
    """Replace a tensor method that has nothing to do on a CPU."""

    @functools.wraps(function)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return self if returns_self else None

    return method


def _first_argument_on_cpu(init: Callable[..., None], convert: Callable[[Any], Any]) -> Callable[..., None]:
    """Wrap an ``__init__`` to convert its device: the first argument, ``device`` or ``device_type``."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if args:
            args = (convert(args[0]), *args[1:])
        for name in kwargs.keys() & {"device", "device_type"}:
            kwargs[name] = convert(kwargs[name])
        init(self, *args, **kwargs)

    return wrapper


def _autocast_query_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(device_type: str = "cuda") -> Any:
        return function(_cpu_device_type(device_type))

    return wrapper


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
