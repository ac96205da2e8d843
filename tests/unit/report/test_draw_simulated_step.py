"""The pictures of a step show every compute where the simulation has it, and nothing else."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from vtp_plugin.plan.schedule.cost.costs import Costs, u_costs, uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import Timeline, simulate
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b, plain_forward_only, plan_u_shape, reference_u_shape
from vtp_plugin.plan.schedule.order.actions import channel_label, parse_action
from vtp_plugin.plan.schedule.order.placement import plain_placement
from vtp_plugin.report.pictures.draw_simulated_step import chrome_trace, draw_svg, draw_text, summarize

SVG = "{http://www.w3.org/2000/svg}"
TIMELINES = {
    "u": simulate(plan_u_shape(3, 5, u_costs(3, latency=2)).schedule, u_costs(3, latency=2)),
    "reference": simulate(reference_u_shape(2, 1), u_costs(2)),
    "1f1b": simulate(one_f_one_b(4, 6), uniform_costs(plain_placement(4), forward=0.001, backward=0.002)),
    "one stage": simulate(plain_forward_only(1, 2), uniform_costs(plain_placement(1), forward=130.0)),
}


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
def test_svg_has_every_compute_at_its_time(timeline: Timeline) -> None:
    text = draw_svg(timeline, title="a < b & c", width=1000)
    assert text.isascii() and "<script" not in text and text.count("http") == 1
    assert text == draw_svg(timeline, title="a < b & c", width=1000)
    root = ET.fromstring(text)
    assert root.findtext(SVG + "title") == "a < b & c"
    boxes = [rect for rect in root.iter(SVG + "rect") if rect.find(SVG + "title") is not None]
    by_row: dict[float, list[ET.Element]] = {}
    for box in boxes:
        by_row.setdefault(float(box.get("y", "")), []).append(box)
    rows = [by_row[y] for y in sorted(by_row)]
    assert len(rows) == len(timeline.spans)
    scale = 1000 / timeline.makespan
    origin = float(next(rect.get("x", "") for rect in root.iter(SVG + "rect") if rect.get("class") == "row"))
    for row, spans in zip(rows, timeline.spans, strict=True):
        for box, span in zip(row, spans, strict=True):
            title = box.findtext(SVG + "title", "")
            assert title.split(":")[0] == str(span.action)
            left, width = float(box.get("x", "")), float(box.get("width", ""))
            assert left == pytest.approx(origin + span.start * scale, abs=0.1)
            assert left + width <= origin + span.end * scale + 0.6
            assert ("backward" in box.get("class", "")) == (span.action.op == "B")
    assert len([line for line in root.iter(SVG + "line") if line.get("class") == "message"]) == len(timeline.flights)
    assert all(0 <= float(box.get("x", "")) <= float(root.get("width", "")) for box in boxes)


def test_svg_labels_later_chunks_only_where_there_are_some() -> None:
    assert "forward, later chunk" in draw_svg(TIMELINES["u"], title="")
    assert "later" not in draw_svg(TIMELINES["1f1b"], title="").partition("</style>")[2]


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
def test_text_has_a_row_for_each_stage_and_idle_time(timeline: Timeline) -> None:
    columns = 400
    lines = draw_text(timeline, columns=columns).splitlines()
    rows = lines[: timeline.placement.num_workers]
    assert "dots: the stage is idle" in lines[-1]
    for row, spans, busy in zip(rows, timeline.spans, timeline.busy, strict=True):
        cells = row.split("|")[1]
        assert len(cells) == columns
        idle = cells.count(".") / columns
        assert idle == pytest.approx(1 - busy / timeline.makespan, abs=0.02)
        names = [str(span.action) for span in spans]
        places = [cells.index(name) for name in names]
        assert places == sorted(places)


def test_short_cells_keep_the_last_digit() -> None:
    row = draw_text(TIMELINES["u"], columns=2 * int(TIMELINES["u"].makespan)).splitlines()[0]
    assert row.startswith("stage 0 |0-1-2-3-4-")


def test_cells_of_a_single_letter_are_not_drawn() -> None:
    """But the ends of the step, with names that fit."""
    row, *_, said = draw_text(TIMELINES["u"], columns=int(TIMELINES["u"].makespan)).splitlines()
    assert row.startswith("stage 0 |0F0-0F1-0F2-") and " ~ " in row and row.endswith("0B4=====|")
    assert said.startswith("Only the first ")


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
def test_trace_has_every_compute_and_message(timeline: Timeline) -> None:
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    stages, channels = processes["stages"], processes["channels"]
    assert stages > max(row for _, row in threads)
    for stage, spans in enumerate(timeline.spans):
        assert threads[stages, stage] == f"stage {stage}"
        found = [e for e in events if e["ph"] == "X" and e["tid"] == stage]
        assert [parse_action(e["name"]) for e in found] == [span.action for span in spans]
        for event, span in zip(found, spans, strict=True):
            assert event["ts"] == pytest.approx(span.start * 1e6) and event["dur"] >= 0
        for first, second in pairwise(found):
            assert first["ts"] + first["dur"] <= second["ts"] + 1e-3
    begins, ends = ({e["id2"]["local"]: e for e in events if e["ph"] == letter} for letter in "be")
    assert begins.keys() == ends.keys() == set(range(len(timeline.flights)))
    for number, flight in enumerate(timeline.flights):
        begin, end = begins[number], ends[number]
        row = channel_label(timeline.placement, flight.channel)
        assert (begin["pid"], begin["name"], end["name"]) == (channels, row, row)
        assert parse_action(begin["args"]["message"]) == flight.action
        assert (begin["ts"], end["ts"]) == pytest.approx((flight.start * 1e6, flight.end * 1e6))


def test_nothing_to_show_is_drawn() -> None:
    costs = Costs(forward=(0.0,), backward=(0.0,), latency=(), bandwidth=(), message_bytes=())
    timeline = simulate(plain_forward_only(1, 1), costs)
    assert max(timeline.utilization) == 0
    assert "|....................|" in draw_text(timeline, columns=20)
    assert summarize(timeline).startswith("simulated step 0; ")
    ET.fromstring(draw_svg(timeline, title="empty"))


@pytest.mark.parametrize("timeline", TIMELINES.values(), ids=TIMELINES)
@pytest.mark.parametrize("width", [300, 680])
def test_texts_of_the_picture_do_not_overlap(timeline: Timeline, width: int) -> None:
    title = "A title that takes more than one line where the picture is narrow, as this one does"
    root = ET.fromstring(draw_svg(timeline, title=title, unit="ms", width=width))
    places: list[tuple[float, float, float, float]] = []
    for text in root.iter(SVG + "text"):
        kind = text.get("class")
        # What a letter of usual fonts takes at most, on average.
        letters = len(text.text or "") * {"title": 8.6, "number": 5.6}.get(kind or "", 6.4)
        x, y = float(text.get("x", "")), float(text.get("y", ""))
        left = x - letters / 2 if kind in ("number", "tick") else x
        places.append((left, y - 9, left + letters, y + 2))
        assert left >= 0 and left + letters <= float(root.get("width", "")) and y < float(root.get("height", ""))
    for index, (left, top, right, bottom) in enumerate(places):
        assert not any(left < c and a < right and top < d and b < bottom for a, b, c, d in places[:index])


def test_picture_says_how_much_each_stage_computes() -> None:
    timeline = TIMELINES["u"]
    texts = [text.text for text in ET.fromstring(draw_svg(timeline, title="")).iter(SVG + "text")]
    assert [text for text in texts if text and text.endswith(" %") and len(text) < 6] == [
        f"{100 * busy / timeline.makespan:.0f} %" for busy in timeline.busy
    ]
    assert "message on its way" in texts and any("idle" in (text or "") for text in texts)
