"""Patches of megatron/core/models/mimo/model."""
