"""Patches of megatron/core/optimizer."""
