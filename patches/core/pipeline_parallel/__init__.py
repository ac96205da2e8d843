"""Patches of megatron/core/pipeline_parallel.

Words:
    backend: what planned steps run over: the run's own pipeline, or several modules as one (``StepBackend``).
    passes: a forward and a backward by Megatron's functions, as the executor's computes need them (``StepPasses``).
"""
