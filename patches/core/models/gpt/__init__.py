"""Patches of megatron/core/models/gpt."""
