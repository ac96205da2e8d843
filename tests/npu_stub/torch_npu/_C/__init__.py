"""Stands for torch_npu's bindings."""

from torch_npu._C import _distributed_c10d as _distributed_c10d
