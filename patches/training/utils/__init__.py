"""Patches of megatron/training/utils."""
