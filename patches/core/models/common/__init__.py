"""Patches of megatron/core/models/common."""
