"""Patches of Megatron's mixtures of experts."""
