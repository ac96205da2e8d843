"""Patches of megatron/training/models."""
