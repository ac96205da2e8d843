"""Whether it is said once which layers the stages of a U-shaped pipeline hold."""

from __future__ import annotations


def check_u_layers(args: object) -> tuple[str, ...]:
    """Refuse layers of a U-shaped pipeline that are given twice or not at all.

    Args:
        args: Megatron's arguments as parsed.

    Returns:
        One line if it is not said once which layers a stage holds.
    """
    options = ("num_layer_list", "pipeline_model_parallel_layout")
    if sum(getattr(args, name, None) is not None for name in options) == 1:
        return ()
    return (
        "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
        "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them",
    )
