"""The picture of a pipeline shows every rank and exactly the transfers of its plans."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise

import pytest

from tests.rules.import_rules import ROOT
from vtp_plugin.plan.boundary.boundary_plan import BoundaryPlan, CollectiveKind
from vtp_plugin.plan.boundary.channel_spec import pipeline_boundaries
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import Direction, PipelineLayout, RankOrder
from vtp_plugin.plan.layout.replica_map import DpMode
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline

SVG = "{http://www.w3.org/2000/svg}"
BOX_WIDTH, BOX_HEIGHT = 116, 42
FRAME_ROOM = 40  # at the left of the boxes of a stage with a finish

# tp sizes, replicas, cp, ring, transport
CASES = [
    ((1, 4, 4), 1, 1, False, "auto"),
    ((1, 4, 4), 1, 1, False, "rank0"),
    ((2, 3), 1, 1, False, "auto"),
    ((6, 4), 1, 1, True, "auto"),
    ((3, 2), 2, 1, True, "sliced"),
    ((1, 2, 1, 2), 1, 1, True, "auto"),
    ((1, 2), 2, 1, False, "auto"),
    ((2, 1, 2), 2, 1, True, "auto"),
    ((3, 3), 1, 2, True, "auto"),
    ((1, 2), 2, 2, False, "auto"),
    ((2, 2), 4, 1, True, "rank0"),
    ((4,), 1, 1, True, "auto"),
    ((1, 2, 2, 1, 2, 4, 2, 1), 1, 1, False, "auto"),
    ((1, 2, 2, 1, 2, 4, 2, 1), 2, 1, True, "auto"),
    ((4, 2, 3, 1), 1, 1, True, "rank0"),
    ((1, 4, 4), 1, 1, True, "auto"),
]


def layout_of(tp_sizes: tuple[int, ...], dp: int = 1, cp: int = 1) -> PipelineLayout:
    return PipelineLayout.from_sizes(tp_sizes, world_size=sum(tp_sizes) * dp * cp, cp=cp)


def plans_of(layout: PipelineLayout, *, is_ring: bool, transport: str) -> list[BoundaryPlan]:
    boundaries = pipeline_boundaries(layout, is_ring=is_ring, rules=TransportRules(transport=transport))
    return [boundary.channel(Direction.FORWARD).probe for boundary in boundaries]


def elements(root: ET.Element, tag: str, *kinds: str) -> list[ET.Element]:
    return [element for element in root.iter(SVG + tag) if element.get("class") in kinds]


def boxes(root: ET.Element) -> dict[int, tuple[str, int, int]]:
    """Return kind, left and top of every box by the rank that is written in it."""
    texts = [(int(t.get("x", "")), int(t.get("y", "")), t.text or "") for t in elements(root, "text", "rank")]
    found: dict[int, tuple[str, int, int]] = {}
    for rect in elements(root, "rect", "leader", "member"):
        left, top = int(rect.get("x", "")), int(rect.get("y", ""))
        (text,) = [text for x, y, text in texts if left < x < left + BOX_WIDTH and top < y < top + BOX_HEIGHT]
        rank = int(text.removeprefix("rank "))
        assert rank not in found
        found[rank] = (rect.get("class", ""), left, top)
    assert len(found) == len(texts)
    return found


def points(path: ET.Element) -> list[tuple[int, int]]:
    return [(int(x), int(y)) for x, y in re.findall(r"(\d+) (\d+)", path.get("d", ""))]


@pytest.mark.parametrize(("tp_sizes", "dp", "cp", "is_ring", "transport"), CASES)
def test_picture_shows_ranks_and_plans(
    tp_sizes: tuple[int, ...], dp: int, cp: int, is_ring: bool, transport: str
) -> None:
    layout = layout_of(tp_sizes, dp, cp)
    plans = plans_of(layout, is_ring=is_ring, transport=transport)
    root = ET.fromstring(draw_pipeline(layout, is_ring=is_ring, rules=TransportRules(transport=transport)))

    shown = boxes(root)
    assert sorted(shown) == list(range(layout.world_size))
    leaders = {layout.leader(i, d, c) for i in range(layout.num_stages) for d, c in layout.replicas}
    assert {rank for rank, (kind, *_) in shown.items() if kind == "leader"} == leaders

    # Every arrow is one transfer of a plan, and leads from the one box to the other.
    drawn = Counter(path.findtext(SVG + "title") for path in elements(root, "path", "transfer"))
    assert drawn == Counter(f"rank {t.src} to rank {t.dst}" for plan in plans for t in plan.transfers)
    for path in elements(root, "path", "transfer"):
        src, dst = (int(rank) for rank in re.findall(r"\d+", path.findtext(SVG + "title", "")))
        assert points(path)[0] == (shown[src][1] + BOX_WIDTH, shown[src][2] + BOX_HEIGHT // 2)
        assert points(path)[-1] == (shown[dst][1], shown[dst][2] + BOX_HEIGHT // 2)

    # Every group of a finish is a bracket that leads to each member but, in a broadcast, the root.
    brackets = [group for group in root.findall(SVG + "g") if group.findtext(SVG + "title")]
    expected: dict[str, list[tuple[int, int]]] = {}
    for finish in (plan.finish for plan in plans):
        assert finish.kind in (CollectiveKind.NONE, CollectiveKind.BROADCAST, CollectiveKind.ALL_GATHER)
        is_gather = finish.kind is CollectiveKind.ALL_GATHER
        # The heads of an all-gather keep clear of those of the transfers, which are in the middle of a box.
        height = BOX_HEIGHT - 8 if is_gather else BOX_HEIGHT // 2
        for group in finish.groups:
            title = f"{finish.kind} among {', '.join(f'rank {rank}' for rank in group)}"
            ends = [(shown[rank][1], shown[rank][2] + height) for rank in (group if is_gather else group[1:])]
            expected[title] = sorted(ends)
    drawn_ends = {
        group.findtext(SVG + "title"): sorted(points(path)[-1] for path in group.findall(SVG + "path"))
        for group in brackets
    }
    assert drawn_ends == expected and len(brackets) == len(expected)
    for path in elements(root, "path", "finish"):
        # Upright and level lines left of the boxes, inside the frame.
        assert all(start[0] == end[0] or start[1] == end[1] for start, end in pairwise(points(path)))
        assert max(x for x, _ in points(path)) - min(x for x, _ in points(path)) < FRAME_ROOM


@pytest.mark.parametrize(("tp_sizes", "dp", "cp", "is_ring", "transport"), CASES)
def test_nothing_overlaps_or_leaves_the_picture(
    tp_sizes: tuple[int, ...], dp: int, cp: int, is_ring: bool, transport: str
) -> None:
    rules = TransportRules(transport=transport)
    root = ET.fromstring(draw_pipeline(layout_of(tp_sizes, dp, cp), is_ring=is_ring, rules=rules))
    width, height = int(root.get("width", "")), int(root.get("height", ""))
    rects = [(left, top) for _, left, top in boxes(root).values()]
    for index, (left, top) in enumerate(rects):
        assert all(abs(left - x) >= BOX_WIDTH or abs(top - y) >= BOX_HEIGHT for x, y in rects[:index])
    for path in elements(root, "path", "transfer", "finish"):
        assert all(0 <= x <= width and 0 <= y <= height for x, y in points(path))
    # An arrow begins and ends at the edge of a box and passes through none, and arrows do not cross.
    arrows = [list(pairwise(points(path))) for path in elements(root, "path", "transfer")]
    for index, arrow in enumerate(arrows):
        for part in arrow:
            assert not any(overlap(area(*part), (x, y, x + BOX_WIDTH, y + BOX_HEIGHT)) for x, y in rects)
            assert not any(cross(part, other) for others in arrows[:index] for other in others)
    frames = [
        tuple(int(f.get(name, "")) for name in ("x", "y", "width", "height")) for f in elements(root, "rect", "frame")
    ]
    # 7 pixels a letter is more than any of the usual fonts needs at this size.
    texts = [text for text in root.iter(SVG + "text") if text.get("class") != "title"]
    for left, right, y in (text_span(text) for text in texts if text.get("class") not in ("rank", "place")):
        assert not any(overlap((left, y - 14, right, y + 4), (a, b, a + w, b + h)) for a, b, w, h in frames)
        assert not any(runs_through(part, (left, y - 9, right, y + 3)) for arrow in arrows for part in arrow)
    lines = [text_span(text) for text in texts]
    assert all(left >= 0 and right <= width and y < height for left, right, y in lines)
    for index, (left, right, y) in enumerate(lines):
        assert all(right <= a or b <= left or abs(y - c) >= 14 for a, b, c in lines[:index])


def area(start: tuple[int, int], end: tuple[int, int]) -> tuple[float, ...]:
    """Return left, top, right and bottom of a line between two points."""
    return min(start[0], end[0]), min(start[1], end[1]), max(start[0], end[0]), max(start[1], end[1])


def cross(one: tuple[tuple[int, int], ...], other: tuple[tuple[int, int], ...]) -> bool:
    """Tell whether two lines cross; to touch, or to run one along the other, is not to cross."""

    def side(line: tuple[tuple[int, int], ...], point: tuple[int, int]) -> int:
        (ax, ay), (bx, by) = line
        return (bx - ax) * (point[1] - ay) - (by - ay) * (point[0] - ax)

    return all(side(p, q[0]) * side(p, q[1]) < 0 for p, q in ((one, other), (other, one)))


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Tell whether two areas overlap; to touch at the edge is not to overlap."""
    return all(one[axis] < other[axis + 2] and other[axis] < one[axis + 2] for axis in (0, 1))


def runs_through(line: tuple[tuple[int, int], ...], place: tuple[float, ...]) -> bool:
    """Tell whether a line comes by any of its points into a place."""
    (ax, ay), (bx, by) = line
    way = ((ax + (bx - ax) * step / 200, ay + (by - ay) * step / 200) for step in range(201))
    return any(place[0] < x < place[2] and place[1] < y < place[3] for x, y in way)


def text_span(text: ET.Element) -> tuple[float, float, int]:
    x, y, length = int(text.get("x", "")), int(text.get("y", "")), 7 * len(text.text or "")
    left = x - length / 2 if text.get("class") else x
    return left, left + length, y


def test_stages_are_titled_in_their_columns() -> None:
    root = ET.fromstring(draw_pipeline(layout_of((1, 4, 4))))
    titles = elements(root, "text", "stage")
    assert [title.text for title in titles] == ["stage 0 - tp 1", "stage 1 - tp 4", "stage 2 - tp 4"]
    frames = elements(root, "rect", "frame")
    for title, frame in zip(titles, frames, strict=True):
        assert 0 < int(title.get("x", "")) - int(frame.get("x", "")) < int(frame.get("width", ""))


def test_many_replicas_are_one_with_their_number() -> None:
    layout = layout_of((1, 2), dp=4, cp=2)
    root = ET.fromstring(draw_pipeline(layout))
    assert sorted(boxes(root)) == sorted(layout.model_ranks())
    assert "replica 0, context-parallel rank 0 of 4 replicas x 2 context-parallel ranks" in {
        text.text for text in root.iter(SVG + "text")
    }


@pytest.mark.parametrize(("tp_sizes", "dp", "num_drawn"), [((8, 8), 4, 16), ((8, 8), 2, 32), ((1, 1, 1, 4), 2, 14)])
def test_replicas_that_are_alike_are_one_where_they_have_many_ranks(
    tp_sizes: tuple[int, ...], dp: int, num_drawn: int
) -> None:
    root = ET.fromstring(draw_pipeline(layout_of(tp_sizes, dp)))
    assert len(boxes(root)) == num_drawn
    is_cut = num_drawn < sum(tp_sizes) * dp
    assert any(text.text == f"replica 0 of {dp} replicas" for text in root.iter(SVG + "text")) == is_cut


def test_replicas_of_unequal_stages_keep_their_arrows_between_the_stages() -> None:
    """Four stages with 1, 2, 4 and 1 replicas: one band, rows as high as what they hold, arrows over no frame."""
    layout = PipelineLayout.from_sizes((4, 2, 1, 4), world_size=16, dp=(1, 2, 4, 1))
    root = ET.fromstring(draw_pipeline(layout))
    assert sorted(boxes(root)) == list(range(16))
    assert int(root.get("width", "")) < 1300 and int(root.get("height", "")) < 1300
    assert len(elements(root, "text", "stage")) == 4
    frames = [
        tuple(int(frame.get(name, "")) for name in ("x", "y", "width", "height"))
        for frame in elements(root, "rect", "frame")
    ]
    for path in elements(root, "path", "transfer"):
        corners = points(path)
        slanted = [part for part in pairwise(corners) if len(corners) > 2 and part[0][1] != part[1][1]]
        for (left, _), (right, _) in slanted:
            assert not any(left < x + width and x < right for x, _, width, _ in frames)


@pytest.mark.parametrize("mode", DpMode)
def test_many_ranks_of_unequal_stages_are_one_replica_of_each_with_its_number(mode: DpMode) -> None:
    """Their arrows would lie on each other: of 32 ranks 22 are drawn."""
    layout = PipelineLayout.from_sizes((8, 4, 2, 8), world_size=32, dp=(1, 2, 4, 1))
    root = ET.fromstring(draw_pipeline(layout, dp_mode=mode))
    assert sorted(boxes(root)) == [*range(12), 16, 17, *range(24, 32)]
    assert int(root.get("width", "")) <= 800 and int(root.get("height", "")) <= 1300
    assert len(elements(root, "text", "stage")) == len(elements(root, "rect", "frame")) == 4
    assert [text.text for text in elements(root, "text", "badge")] == ["x 2", "x 4", "x 2"]  # the last: the legend's
    said = " ".join(text.text or "" for text in elements(root, "text", "middle"))
    words = ("to 2 in turn", "from 4 in turn") if mode is DpMode.MULTIPLEX else ("split over 2", "joined from 4")
    assert all(word in said for word in words)
    # 8 to 4 ranks, 4 to 2, 2 to 8.
    assert len(elements(root, "path", "transfer")) == 8 + 4 + 8
    arrows = [part for path in elements(root, "path", "transfer") for part in pairwise(points(path))]
    for left, right, y in map(text_span, elements(root, "text", "middle", "stage")):
        assert not any(runs_through(part, (left, y - 9, right, y + 3)) for part in arrows)


def test_equal_replicas_are_one_with_their_number() -> None:
    root = ET.fromstring(draw_pipeline(layout_of((8, 8), 4)))
    assert [text.text for text in elements(root, "text", "badge")] == ["x 4", "x 4", "x 2"]
    assert int(root.get("height", "")) < 700
    root = ET.fromstring(draw_pipeline(layout_of((1, 2), 2)))
    assert not elements(root, "text", "badge"), "all are drawn"


def test_replica_major_order_has_its_own_ranks() -> None:
    layout = PipelineLayout.from_sizes((1, 2), world_size=6, order=RankOrder.REPLICA_MAJOR)
    root = ET.fromstring(draw_pipeline(layout))
    titles = [path.findtext(SVG + "title") for path in elements(root, "path", "transfer")]
    assert titles == ["rank 0 to rank 1", "rank 0 to rank 2", "rank 3 to rank 4", "rank 3 to rank 5"]


def test_document_is_self_contained() -> None:
    text = draw_pipeline(layout_of((1, 2, 1, 2), 2), is_ring=True)
    assert text.isascii()
    tags = {element.tag.removeprefix(SVG) for element in ET.fromstring(text).iter()}
    assert tags == {"svg", "title", "desc", "style", "defs", "marker", "path", "rect", "text", "g"}
    assert not re.search(r"href|@import|url\((?!#)|<!|\son\w+=", text)
    assert "sans-serif" in text


def test_committed_picture_is_what_is_drawn_now() -> None:
    committed = (ROOT / "docs/pictures/pipeline-1-4-4.svg").read_text(encoding="ascii")
    assert committed == draw_pipeline(layout_of((1, 4, 4)))


@pytest.mark.parametrize(
    ("tp_sizes", "rules", "labels"),
    [
        ((1, 4, 4), TransportRules(), ["in slices", "rank to rank"]),
        ((1, 4, 4), TransportRules(sites=("edge", "cloud", "cloud")), ["leader to leader", "rank to rank"]),
        ((1, 1), TransportRules(), ["rank to rank"]),
    ],
)
def test_words_say_how_a_boundary_is_crossed(
    tp_sizes: tuple[int, ...], rules: TransportRules, labels: list[str]
) -> None:
    root = ET.fromstring(draw_pipeline(layout_of(tp_sizes), rules=rules))
    assert [text.text for text in elements(root, "text", "middle")] == labels


def test_a_context_parallel_size_per_stage() -> None:
    layout = PipelineLayout.from_sizes((2, 1, 1), world_size=5, cp=(1, 2, 1))
    svg = draw_pipeline(layout)
    root = ET.fromstring(svg)
    assert sorted(boxes(root)) == list(range(5))
    assert len(list(elements(root, "rect", "frame"))) == 4, "stage 1 alone has a second row"
    assert "--vtp-size-list 2,1,1 --vtp-cp-list 1,2,1" in svg and "stage 1 - tp 1, cp 2" in svg
    assert svg.count('class="transfer"') == 6, "two ranks to two, then two to one"


@pytest.mark.parametrize("mode", DpMode)
def test_a_data_parallel_size_per_stage(mode: DpMode) -> None:
    layout = PipelineLayout.from_sizes((1, 2), world_size=5, dp=(1, 2))
    svg = draw_pipeline(layout, dp_mode=mode)
    root = ET.fromstring(svg)
    assert sorted(boxes(root)) == list(range(5))
    assert len(list(elements(root, "rect", "frame"))) == 3, "stage 1 alone has a second row"
    assert f"--vtp-dp-list 1,2 --vtp-dp-mode {mode}" in svg and "stage 1 - tp 2, dp 2" in svg
    titles = {path.findtext(SVG + "title") for path in elements(root, "path", "transfer")}
    assert titles == {f"rank 0 to rank {rank}" for rank in (1, 2, 3, 4)}


def test_legend_names_what_is_drawn() -> None:
    rules = TransportRules(sites=("edge", "cloud", "cloud"))
    texts = {text.text for text in ET.fromstring(draw_pipeline(layout_of((1, 2, 3)), rules=rules)).iter(SVG + "text")}
    assert "all-gather or broadcast inside the stage after the transfers" in texts
    texts = {text.text for text in ET.fromstring(draw_pipeline(layout_of((2, 2)))).iter(SVG + "text")}
    assert not any("inside the stage" in (text or "") for text in texts)


def test_sites_stand_above_their_stages() -> None:
    rules = TransportRules(sites=("edge", "cloud", "cloud"))
    svg = draw_pipeline(layout_of((1, 4, 4)), rules=rules, num_rings=1)
    root = ET.fromstring(svg)
    sites = elements(root, "text", "site")
    frames = elements(root, "rect", "frame")
    assert [text.text for text in sites] == ["site edge", "site cloud"]
    ends = [(int(frame.get("x", "")), int(frame.get("x", "")) + int(frame.get("width", ""))) for frame in frames]
    for text, (left, right) in zip(sites, [ends[0], (ends[1][0], ends[2][1])], strict=True):
        assert int(text.get("x", "")) == (left + right) // 2
    brackets = [points(path) for path in elements(root, "path", "site")]
    assert [(way[0][0], way[-1][0]) for way in brackets] == [ends[0], (ends[1][0], ends[2][1])]
    assert "--layerwise-disaggregated-training" in svg and "back to the edge, leader to leader" in svg
    assert "site" not in draw_pipeline(layout_of((1, 4, 4))).partition("</style>")[2]


@pytest.mark.parametrize(
    ("dp_sizes", "text"),
    [
        ((1, 1), "2 stages, 3 ranks; every"),
        ((3, 3), "2 stages, 9 ranks, 3 replicas; every"),
        ((1, 2), "2 stages, 5 ranks, from 1 to 2 replicas of a stage; every"),
    ],
)
def test_replicas_are_counted(dp_sizes: tuple[int, ...], text: str) -> None:
    world_size = dp_sizes[0] + 2 * dp_sizes[1]
    assert text in draw_pipeline(PipelineLayout.from_sizes((1, 2), world_size=world_size, dp=dp_sizes))


def test_ranks_that_share_a_sequence_are_no_replicas() -> None:
    assert "2 stages, 6 ranks; every" in draw_pipeline(layout_of((1, 2), cp=2))


def test_many_ranks_share_a_box() -> None:
    root = ET.fromstring(draw_pipeline(layout_of((8, 64))))
    assert len(elements(root, "rect", "leader", "member")) == 8 + 4 and len(elements(root, "rect", "hidden")) == 1
    assert "ranks 11 to 70" in {text.text for text in elements(root, "text", "place")}
    titles = [path.findtext(SVG + "title", "") for path in elements(root, "path", "transfer")]
    hidden = [title for path in elements(root, "path", "transfer many") if (title := path.findtext(SVG + "title"))]
    assert titles == [f"rank {src} to rank {dst}" for src, dst in ((0, 8), (0, 9), (0, 10), (7, 71))]
    assert sum(int(title.split()[0]) for title in hidden) == 60


@pytest.mark.parametrize(
    ("tp_sizes", "dp_sizes"), [((1, 2, 2), (1, 2, 2)), ((2, 1, 2), (4, 2, 2)), ((1, 1), (1, 4)), ((2, 2, 1), (1, 2, 4))]
)
@pytest.mark.parametrize("mode", DpMode)
def test_labels_keep_clear_of_arrows_and_of_each_other(
    tp_sizes: tuple[int, ...], dp_sizes: tuple[int, ...], mode: DpMode
) -> None:
    """Also where replicas of one stage send to those of another, and arrows cross."""
    world_size = sum(tp * dp for tp, dp in zip(tp_sizes, dp_sizes, strict=True))
    root = ET.fromstring(
        draw_pipeline(PipelineLayout.from_sizes(tp_sizes, world_size=world_size, dp=dp_sizes), dp_mode=mode)
    )
    labels = elements(root, "text", "middle")
    places = [(left, y - 10, right, y + 3) for left, right, y in map(text_span, labels)]
    arrows = [part for path in elements(root, "path", "transfer") for part in pairwise(points(path))]
    for index, place in enumerate(places):
        assert not any(overlap(place, other) for other in places[:index])
        assert not any(runs_through(part, place) for part in arrows)
    # Every pair of neighbours has at least one.
    assert len({text.get("x") for text in labels}) == len(tp_sizes) - 1
