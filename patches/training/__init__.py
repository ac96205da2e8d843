"""Patches of megatron/training."""
