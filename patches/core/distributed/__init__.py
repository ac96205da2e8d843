"""Patches of megatron/core/distributed."""
