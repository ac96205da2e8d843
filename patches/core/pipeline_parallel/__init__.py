"""Patches of megatron/core/pipeline_parallel."""
