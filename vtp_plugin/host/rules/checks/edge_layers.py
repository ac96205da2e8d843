"""Whether exactly one option gives the layers of a U-shaped pipeline."""

from __future__ import annotations


def check_u_layers(
    num_layer_list: object, pipeline_layout: object, encoder_layer_list: object = None
) -> tuple[str, ...]:
    """Find out whether the layers of a U-shaped pipeline are given exactly once.

    Args:
        num_layer_list: The plugin's list of layers, or None.
        pipeline_layout: Megatron's ``--pipeline-model-parallel-layout``, or None.
        encoder_layer_list: The plugin's list of an encoder's layers, or None.

    Returns:
        One line if they are given twice or not at all.
    """
    if encoder_layer_list is not None and num_layer_list is None:
        return ("--vtp-encoder-layer-list needs --num-layer-list, the layers of the language model; give both",)
    if (num_layer_list is None) != (pipeline_layout is None):
        return ()
    return (
        "--layerwise-disaggregated-training needs --num-layer-list, such as 1,3,3,1, or "
        "--pipeline-model-parallel-layout, such as 'Et|ttt|ttt|tL'; give one of them",
    )
