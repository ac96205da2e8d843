"""Patches of megatron/core/datasets."""
