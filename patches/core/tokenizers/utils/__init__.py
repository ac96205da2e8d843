"""Patches of megatron/core/tokenizers/utils."""
