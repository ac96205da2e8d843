"""MindSpeed-MM's lists of layers: what of them is a U with one ring or two, and what does not fit the stages."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.hosts import ROOT
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.layout.layer_lists import (
    LayerLists,
    Rows,
    encoder_layers,
    num_layers,
    read_rows,
    ring_layers,
    rows_of_u,
)


def test_its_three_rows_become_two_where_the_vision_tower_is_on_the_edge() -> None:
    two = LayerLists(((3, 0, 0), (0, 0, 0)), ((1, 16, 16), (2, 0, 0)))
    assert rows_of_u(two) == two and ring_layers(two) == (1, 16, 16, 2) and encoder_layers(two) is None
    assert rows_of_u(LayerLists(((2, 0, 0), (1, 0, 0), (0, 0, 0)), ((0, 0, 0), (1, 16, 16), (2, 0, 0)))) == two


@pytest.mark.parametrize(
    ("vision", "text", "encoder", "language"),
    [
        # The example of its own documents, on fewer stages.
        (((3, 7), (1, 0), (0, 0)), ((0, 0), (0, 16), (0, 0)), (3, 7, 1), (0, 16, 0)),
        (((1, 2, 3), (4, 0, 0), (0, 0, 0)), ((0, 0, 0), (5, 6, 7), (8, 0, 0)), (1, 2, 3, 4), (5, 6, 7, 8)),
    ],
)
def test_three_rows_with_vision_layers_in_the_cloud_are_two_rings(
    vision: Rows, text: Rows, encoder: tuple[int, ...], language: tuple[int, ...]
) -> None:
    lists = LayerLists(vision, text)
    assert rows_of_u(lists) == lists
    assert (encoder_layers(lists), ring_layers(lists)) == (encoder, language)


@pytest.mark.parametrize(
    ("vision", "text", "words"),
    [
        (((3, 7), (1, 0)), ((0, 16), (0, 0)), "goes round twice"),
        (((3, 7), (1, 0), (0, 0)), ((0, 16), (1, 0)), "goes round twice"),
        (((3, 7), (1, 0), (0, 0)), ((0, 0, 0), (0, 8, 8), (0, 0, 0)), "three rows of one length"),
        (((3, 7), (1, 1), (0, 0)), ((0, 0), (0, 16), (0, 0)), "the second one its last layers on the edge"),
        (((3, 7), (1, 0), (1, 0)), ((0, 0), (0, 16), (0, 0)), "the second one its last layers on the edge"),
        (((0, 7), (1, 0), (0, 0)), ((0, 0), (0, 16), (0, 0)), "has layers on every stage"),
        (((3, 7, 0), (1, 0, 0), (0, 0, 0)), ((0, 0, 0), (0, 8, 8), (0, 0, 0)), "has layers on every stage"),
        (((3, 7), (0, 0), (0, 0)), ((0, 0), (0, 16), (0, 0)), "has layers on every stage"),
        (((3, 7), (1, 0), (0, 0)), ((1, 0), (0, 16), (0, 0)), "the edge's in the second and third row may be none"),
        (((3, 7), (1, 0), (0, 0)), ((0, 0), (0, 16), (0, 1)), "the edge's in the second and third row may be none"),
        (((3, 7), (1, 0), (0, 0)), ((0, 0), (16, 0), (0, 0)), "has layers on every cloud stage"),
        (((3, 0),), ((1, 2),), "change the JSON"),
        (((3, 0), (0, 0)), ((1, 2), (1, 1)), "change the JSON"),
        (((3, 0), (1, 0)), ((1, 2), (1, 0)), "change the JSON"),
        (((3, 0), (0, 0), (0, 0)), ((0, 4), (1, 2), (1, 0)), "change the JSON"),
    ],
    ids=[
        "two rings in two rows",
        "rows of one only",
        "rows of two lengths",
        "vision in the cloud's second chunk",
        "vision in the last chunk of two rings",
        "no vision layer first",
        "a cloud stage without vision layers",
        "no vision layer last",
        "text before the vision's end",
        "text in the cloud's third chunk",
        "a cloud stage without text layers",
        "one row",
        "a layer in the cloud's second chunk",
        "vision in the last chunk",
        "four chunks",
    ],
)
def test_what_is_no_ring_is_refused(vision: Rows, text: Rows, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as refused:
        rows_of_u(LayerLists(vision, text))
    assert "\n" not in str(refused.value) and "pipeline_num_layers" in str(refused.value)


def test_lists_are_measured_against_the_stages() -> None:
    flat = LayerLists(read_rows([2, 0]), read_rows([1, 3]))
    assert not list(flat.problems(2, num_rows=1))
    found = [problem.partition(";")[0] for problem in flat.problems(3, num_rows=1)]
    assert found == ["pipeline_num_layers 2,0 of vision_encoder", "pipeline_num_layers 1,3 of text_decoder"]
    assert len(list(flat.problems(2, num_rows=2))) == 2


def test_only_stages_with_vision_layers_share_its_heads() -> None:
    lists = LayerLists(read_rows([2, 0]), read_rows([1, 3]))
    assert not list(lists.problems_of_heads((2, 3), 4))
    (problem,) = lists.problems_of_heads((3, 1), 4)
    assert "stage 0" in problem


def test_the_guide_turns_the_example_of_its_documents_into_one_ring() -> None:
    """The lists of ``docs/guides/mindspeed-mm.md``: its own two rings, and one ring; both fit."""
    text = (ROOT / "docs/guides/mindspeed-mm.md").read_text()
    rows = re.findall(r"\| `pipeline_num_layers` of `\w+` \| `(.*)` \| `(.*)` \|\n", text)
    both, ours = (LayerLists(*(read_rows(json.loads(cell)) for cell in cells)) for cells in zip(*rows, strict=True))
    ((given, replicas),) = re.findall(r"`--vtp-size-list ([\d,]+) --vtp-dp-list ([\d,]+)`", text)
    assert {given} == set(re.findall(r"`--layerwise-disaggregated-training --vtp-size-list ([\d,]+)`", text))
    sizes, dp_sizes = (tuple(map(int, each.split(","))) for each in (given, replicas))
    assert (encoder_layers(both), encoder_layers(ours)) == ((3, 7, 7, 7, 7, 1), None)
    for lists, rows in ((both, 3), (ours, 2)):
        assert rows_of_u(lists) == lists
        assert not [*lists.problems(len(sizes), num_rows=rows), *lists.problems_of_heads(sizes, 16)]
        assert (num_layers(lists.vision), num_layers(lists.text)) == (32, 64)
    assert sum(size * dp for size, dp in zip(sizes, dp_sizes, strict=True)) == 2 + 32
