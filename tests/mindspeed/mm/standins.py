"""What MindSpeed-MM needs of an NPU and has no CPU for: operators in plain torch, a profiler that does nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch


def rms_norm(tensor: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch_npu.npu_rms_norm``: the normalised tensor, and the factors."""
    factor = torch.rsqrt(tensor.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (tensor.float() * factor).to(tensor.dtype) * gamma, factor


def swiglu(tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """As ``torch_npu.npu_swiglu``: the first half, gated, times the second."""
    gate, value = tensor.chunk(2, dim)
    return torch.nn.functional.silu(gate) * value


def rotary_mul(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As ``torch_npu.npu_rotary_mul``: halves of the last dimension, rotated."""
    first, second = tensor.chunk(2, -1)
    return tensor * cos + torch.cat((-second, first), -1) * sin


def install_operators() -> None:
    """Give the stand-in for torch_npu the operators and modules that MindSpeed-MM uses."""
    # The stand-in for the package is on the path of these runs only.
    npu: Any = __import__("torch_npu")
    npu.npu_rms_norm, npu.npu_swiglu, npu.npu_rotary_mul = rms_norm, swiglu, rotary_mul
    npu.npu.config = SimpleNamespace(allow_internal_format=True)
    npu.profiler = ModuleType("torch_npu.profiler")
    npu.profiler.dynamic_profile = None  # of a run that is not profiled
    part: Any = ModuleType("torch_npu.profiler.profiler")
    part.analyse = lambda *args, **kwargs: None
    sys.modules |= {"torch_npu.profiler": npu.profiler, "torch_npu.profiler.profiler": part}


@contextlib.contextmanager
def npu_is_a_device() -> Iterator[None]:
    """Take ``torch.device("npu")`` for the CPU, as a default argument of one of its functions says."""
    device: Any = torch.device
    torch.device = lambda *args: device("cpu" if args == ("npu",) else args[0])  # pyright: ignore
    try:
        yield
    finally:
        torch.device = device  # pyright: ignore


def replace_constants(function: FunctionType, values: dict[object, object]) -> None:
    """Put other constants into a function: it finds pictures by ids that are written into its code."""
    code = function.__code__
    assert values.keys() <= set(code.co_consts), (function.__qualname__, code.co_consts)
    function.__code__ = code.replace(co_consts=tuple(_replaced(value, values) for value in code.co_consts))


def _replaced(value: object, values: dict[object, object]) -> object:
    return values[value] if isinstance(value, int) and value in values else value


class AfterImport(MetaPathFinder):
    """Changes modules right after they are imported, and nothing else.

    Args:
        changes: what is done with a module, by its name.
        around: a context in which a module is executed, by its name.
    """

    def __init__(
        self,
        changes: dict[str, Callable[[Any], None]],
        around: dict[str, Callable[[], contextlib.AbstractContextManager[None]]],
    ) -> None:
        self._changes = changes
        self._around = around
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Let Python's own finder find the module, and change it once it is executed."""
        change = self._changes.pop(fullname, None)
        spec = PathFinder.find_spec(fullname, path, target) if change is not None else None
        if change is not None and spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, change, self._around.get(fullname, contextlib.nullcontext))
        return spec


class _Changing(Loader):
    def __init__(self, loader: Loader, change: Callable[[Any], None], around: Callable[[], Any]) -> None:
        self._loader = loader
        self._change = change
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with self._around():
            self._loader.exec_module(module)
        self._change(module)
