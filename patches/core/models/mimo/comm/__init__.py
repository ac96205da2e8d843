"""Patches of megatron/core/models/mimo/comm."""
