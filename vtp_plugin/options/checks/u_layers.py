"""Whether exactly one option gives the layers of a U-shaped pipeline."""

from __future__ import annotations


def check_u_layers(args: object) -> tuple[str, ...]:
    """Find out whether the layers of a U-shaped pipeline are given exactly once.

    Args:
        args: Megatron's arguments as parsed.

    Returns:
        One line if they are given twice or not at all.
    """
    options = ("num_layer_list", "pipeline_model_parallel_layout")
    if sum(getattr(args, name, None) is not None for name in options) == 1:
        return ()
    return (
        "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
        "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them",
    )
