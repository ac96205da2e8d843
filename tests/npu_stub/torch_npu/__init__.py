"""Stands for torch_npu where no NPU is: enough of it that MindSpeed imports, patches Megatron and trains over gloo.

Written from what MindSpeed and MindSpeed-LLM import, and from torch_npu's public interface; nothing is computed here.
An operator that only an NPU has raises, with its name. What tests ask of a *working* NPU, ``torch_npu.npu.pretend()``
gives: see there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from torch_npu import _C as _C
from torch_npu import contrib as contrib
from torch_npu import npu as npu
from torch_npu import utils as utils

__version__ = "2.7.1"
unsupported_dtype: tuple[torch.dtype, ...] = ()

# As torch_npu does: it becomes the module torch.npu.
torch.npu = npu  # pyright: ignore[reportAttributeAccessIssue]
sys.modules.setdefault("torch.npu", npu)


def __getattr__(name: str) -> Any:
    """Give a stand-in for an operator; it may be looked up, not called."""
    if not name.lstrip("_").startswith("npu_"):
        raise AttributeError(f"this stand-in for torch_npu has no {name}")

    def operator(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch_npu.{name}: this stand-in for torch_npu has no operators")

    operator.__name__ = name
    return operator
