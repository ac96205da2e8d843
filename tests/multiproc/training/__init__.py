"""Runs that compute what the uniform run computes: models, optimizers, schedules of Megatron, whole scripts."""
