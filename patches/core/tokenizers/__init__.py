"""Patches of megatron/core/tokenizers."""
