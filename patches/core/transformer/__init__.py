"""Patches of megatron/core/transformer."""
