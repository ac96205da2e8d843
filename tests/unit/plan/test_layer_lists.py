"""MindSpeed-MM's lists of layers: what of them is a U with one ring, and what does not fit the stages."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.hosts import ROOT
from vtp_plugin.errors import LayoutError
from vtp_plugin.plan.layout.layer_lists import LayerLists, Rows, num_layers, one_ring, read_rows, ring_layers


def test_its_three_rows_become_two_where_the_vision_tower_is_on_the_edge() -> None:
    two = LayerLists(((3, 0, 0), (0, 0, 0)), ((1, 16, 16), (2, 0, 0)))
    assert one_ring(two) == two and ring_layers(two) == (1, 16, 16, 2)
    assert one_ring(LayerLists(((2, 0, 0), (1, 0, 0), (0, 0, 0)), ((0, 0, 0), (1, 16, 16), (2, 0, 0)))) == two


@pytest.mark.parametrize(
    ("vision", "text", "words"),
    [
        # The example of its own documents: two rings.
        (((3, 7), (1, 0), (0, 0)), ((0, 0), (0, 16), (0, 0)), "goes round twice"),
        (((3, 0),), ((1, 2),), "change the JSON"),
        (((3, 0), (0, 0)), ((1, 2), (1, 1)), "change the JSON"),
        (((3, 0), (1, 0)), ((1, 2), (1, 0)), "change the JSON"),
        (((3, 0), (0, 0), (0, 0)), ((0, 4), (1, 2), (1, 0)), "change the JSON"),
    ],
    ids=["two rings", "one row", "a layer in the cloud's second chunk", "vision in the last chunk", "four chunks"],
)
def test_what_is_no_ring_is_refused(vision: Rows, text: Rows, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as refused:
        one_ring(LayerLists(vision, text))
    assert "\n" not in str(refused.value) and "pipeline_num_layers" in str(refused.value)


def test_lists_are_measured_against_the_stages() -> None:
    flat = LayerLists(read_rows([2, 0]), read_rows([1, 3]))
    assert not list(flat.problems(2, num_rows=1))
    assert [problem.partition(";")[0] for problem in flat.problems(3, num_rows=1)] == [
        "pipeline_num_layers 2,0 of vision_encoder",
        "pipeline_num_layers 1,3 of text_decoder",
    ]
    assert len(list(flat.problems(2, num_rows=2))) == 2


def test_only_stages_with_vision_layers_share_its_heads() -> None:
    lists = LayerLists(read_rows([2, 0]), read_rows([1, 3]))
    assert not list(lists.problems_of_heads((2, 3), 4))
    (problem,) = lists.problems_of_heads((3, 1), 4)
    assert "stage 0" in problem


def test_the_guide_turns_the_example_of_its_documents_into_one_ring() -> None:
    """The lists of ``docs/ascend.md``: MindSpeed-MM's are refused, ours have as many layers and fit the sizes."""
    text = (ROOT / "docs" / "ascend.md").read_text()
    rows = re.findall(r"\| `pipeline_num_layers` of `\w+` \| `(.*)` \| `(.*)` \|\n", text)
    theirs, ours = (LayerLists(*(read_rows(json.loads(cell)) for cell in cells)) for cells in zip(*rows, strict=True))
    with pytest.raises(LayoutError, match="goes round twice"):
        one_ring(theirs)
    (given,) = set(re.findall(r"`--layerwise-disaggregated-training --vtp-size-list ([\d,]+)`", text))
    sizes = tuple(map(int, given.split(",")))
    assert one_ring(ours) == ours and not [*ours.problems(len(sizes), num_rows=2), *ours.problems_of_heads(sizes, 16)]
    for lists in (theirs, ours):
        assert (num_layers(lists.vision), num_layers(lists.text)) == (32, 64)
    assert sum(sizes) == 2 + 32
