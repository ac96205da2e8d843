"""Patches of megatron/core."""
