"""Stands for torch_npu.contrib."""
