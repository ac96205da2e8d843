"""Layers of a U-shaped pipeline: what is accepted, and what Megatron makes of it."""

from __future__ import annotations

import pytest

from vtp_plugin.config.flag import parse_layer_list
from vtp_plugin.errors import ConfigError
from vtp_plugin.plan.layout.layer_lists import check_layers, layers_of_chunk, layout_of
from vtp_plugin.plan.schedule.order.placement import u_placement


@pytest.mark.parametrize("text", ["", "1,,1", "1,0,1", "1,-1,1", "1,x,1", "1.5,1,1"])
def test_bad_list_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--num-layer-list"):
        parse_layer_list(text)


@pytest.mark.parametrize(
    ("layers", "num_stages", "num_layers", "words"),
    [
        ((1, 1), 1, 2, "at least two stages"),
        ((1, 1, 1), 3, 3, "3 parts"),
        ((1, 0, 1), 2, 2, "without layers"),
        ((0, 1, 1), 2, 2, "without layers"),
        ((1, 2, 1), 2, 5, "--num-layers is 5"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    layers: tuple[int, ...], num_stages: int, num_layers: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_layers(layers, num_stages=num_stages, num_layers=num_layers, option="--num-layer-list")


def test_of_two_rings_the_edges_parts_may_be_embedding_and_head_alone() -> None:
    check_layers((0, 2, 0), num_stages=2, num_layers=2, option="--num-layer-list", least_on_edge=0)
    with pytest.raises(ConfigError, match="without layers"):
        check_layers((0, 0, 1), num_stages=2, num_layers=1, option="--num-layer-list", least_on_edge=0)


@pytest.mark.parametrize("layers", [(1, 1, 1), (2, 3, 1, 4), (1, 2, 3, 4, 5)])
def test_megatron_reads_the_layout_as_meant(layers: tuple[int, ...]) -> None:
    reason = "this Megatron reads no layout of the pipeline"
    pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout", reason=reason)
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    num_stages = len(layers) - 1
    check_layers(layers, num_stages=num_stages, num_layers=sum(layers), option="--num-layer-list")
    layout = PipelineParallelLayerLayout(layout_of(layers), num_stages)
    layout.validate_layer_layout(sum(layers), 0)
    counts = [[chunk.count(LayerType.decoder) for chunk in stage] for stage in layout.layout]
    assert counts == [[layers[0], layers[-1]], *([part, 0] for part in layers[1:-1])]


@pytest.mark.parametrize("layers", [(1, 1, 1), (2, 3, 1, 4), (1, 2, 3, 4, 5)])
def test_chunks_along_the_model_hold_each_layer_once_in_order(layers: tuple[int, ...]) -> None:
    placement = u_placement(len(layers) - 1)
    chunks = [
        layers_of_chunk(layers, stage=stage, chunk=placement.chunk(vstage))
        for vstage, stage in enumerate(placement.stages)
    ]
    assert [len(chunk) for chunk in chunks] == list(layers)
    assert [layer for chunk in chunks for layer in chunk] == list(range(sum(layers)))
    assert not any(layers_of_chunk(layers, stage=stage, chunk=1) for stage in range(1, placement.num_stages))
