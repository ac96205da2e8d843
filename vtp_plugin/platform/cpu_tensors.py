"""Tensor factories and tensor methods that understand ``device="cuda"`` on a machine without CUDA.

Each function is wrapped where Megatron looks it up (``torch.zeros``, ``torch.Tensor.to``). A ``TorchFunctionMode``
would slow down every torch call and hold for one thread only, and another thread runs Megatron's backward functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.amp.autocast_mode
import torch.utils._device

from vtp_plugin.platform.cpu_random import DeviceGenerator
from vtp_plugin.util.undo import UndoStack

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
