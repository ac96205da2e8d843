"""Stands for torch_npu.utils."""
