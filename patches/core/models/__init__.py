"""Patches of megatron/core/models."""
