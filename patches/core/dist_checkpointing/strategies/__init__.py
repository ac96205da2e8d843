"""Patches of megatron/core/dist_checkpointing/strategies."""
