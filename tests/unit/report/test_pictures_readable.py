"""Every picture can be read: on a light and a dark ground, at its axis, and by those who cannot see it."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rules.import_rules import ROOT
from vtp_plugin.plan.boundary.strategies.known_strategies import TransportRules
from vtp_plugin.plan.layout.pipeline_layout import PipelineLayout
from vtp_plugin.plan.schedule.cost.costs import uniform_costs
from vtp_plugin.plan.schedule.cost.simulator import simulate
from vtp_plugin.plan.schedule.make.u_shape import one_f_one_b
from vtp_plugin.plan.schedule.order.placement import plain_placement
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.draw_rows import Box, Group, draw_rows
from vtp_plugin.report.pictures.draw_simulated_step import draw_svg
from vtp_plugin.report.pictures.svg import is_document, round_ticks

SVG = "{http://www.w3.org/2000/svg}"
GROUNDS = {"light": "#ffffff", "dark": "#0d1117"}
LEAST_CONTRAST = 4.5  # of text: WCAG 2, AA
FILES = [path for path in sorted((ROOT / "docs").rglob("*.svg")) if path.name != "favicon.svg"]  # an icon without text
COMMITTED = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}


def drawn() -> Iterator[tuple[str, str]]:
    """Yield pictures with marks that no committed one has."""
    yield "replicas", draw_pipeline(PipelineLayout.from_sizes((8, 4, 2, 8), world_size=32, dp=(1, 2, 4, 1)))
    sites = TransportRules(sites=("edge", "cloud", "cloud"))
    yield "sites", draw_pipeline(PipelineLayout.from_sizes((1, 16, 16), world_size=33), rules=sites, num_rings=1)
    schedule = one_f_one_b(4, 6)
    yield "timeline", draw_svg(simulate(schedule, uniform_costs(plain_placement(4))), title="a < b", unit="ms")
    boxes = [
        Box(kind="one", start=0.0, end=3.0, text="0F13", short="13"),
        Box(kind="one", start=3.0, end=3.1, text="x"),
    ]
    groups = [Group(name=name, note="a note", rows=[("rank 0", boxes)]) for name in ("run", "plan")]
    yield "rows", draw_rows(groups, title="two groups " * 12, unit="ms", colours={"one": "#3f6ca8"})


PICTURES = {**COMMITTED, **dict(drawn())}


@dataclass(frozen=True, slots=True)
class Shape:
    """A rectangle of the picture, or the room that a text takes."""

    left: float
    top: float
    right: float
    bottom: float
    fill: str = "none"
    text: str = ""

    @property
    def middle(self) -> tuple[float, float]:
        return (self.left + self.right) / 2, (self.top + self.bottom) / 2

    def holds(self, x: float, y: float) -> bool:
        return self.left <= x <= self.right and self.top <= y <= self.bottom

    def overlaps(self, other: Shape) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def styles(root: ET.Element, ground: str) -> dict[str, dict[str, str]]:
    """Return the declarations of every selector on a ground."""
    text = root.findtext(SVG + "style", "")
    light, _, rest = text.partition("@media (prefers-color-scheme: dark) {")
    dark = rest.rpartition("}")[0]
    found: dict[str, dict[str, str]] = {}
    for selectors, body in re.findall(r"([^{}]+)\{([^{}]*)\}", light + (dark if ground == "dark" else "")):
        declared = {key.strip(): value.strip() for key, value in re.findall(r"([\w-]+):([^;]+);", body)}
        for selector in selectors.split(","):
            found.setdefault(selector.strip(), {}).update(declared)
    return found


def style_of(element: ET.Element, rules: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    tag = element.tag.removeprefix(SVG)
    found = {name: value for name, value in element.attrib.items() if name in ("fill", "text-anchor", "font-size")}
    for selector in (tag, *(f"{tag}.{kind}" for kind in element.get("class", "").split())):
        found.update(rules.get(selector, {}))
    found.update(dict(re.findall(r"([\w-]+):([^;]+)", element.get("style", ""))))
    return found


def shapes(root: ET.Element, ground: str) -> Iterator[Shape]:
    """Yield filled rectangles and texts, in the order in which they are painted."""
    rules = styles(root, ground)
    for element in root.iter():
        style = style_of(element, rules)
        if element.tag == SVG + "rect":
            x, y, width, height = (float(element.get(name, "")) for name in ("x", "y", "width", "height"))
            if style.get("fill", "none") != "none" and float(style.get("fill-opacity", "1")) > 0.5:
                yield Shape(x, y, x + width, y + height, style["fill"])
        elif element.tag == SVG + "text" and element.text:
            x, y = float(element.get("x", "")), float(element.get("y", ""))
            size = float(style["font-size"].removesuffix("px"))
            # Narrower than the letters of most fonts: what overlaps so does in any.
            width = 0.45 * size * len(element.text)
            left = x - {"middle": width / 2, "end": width}.get(style.get("text-anchor", ""), 0.0)
            yield Shape(left, y - 0.6 * size, left + width, y, style["fill"], element.text)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21) and contrast("#777777", "#ffffff") < LEAST_CONTRAST


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("name", PICTURES)
def test_texts_have_contrast(name: str, ground: str) -> None:
    below: list[Shape] = []
    num_texts = 0
    for shape in shapes(ET.fromstring(PICTURES[name]), ground):
        if not shape.text:
            below.append(shape)
            continue
        num_texts += 1
        behind = [box.fill for box in below if box.holds(*shape.middle)]
        # A box of two colours has both behind its text.
        for fill in behind or [GROUNDS[ground]]:
            assert contrast(shape.fill, fill) >= LEAST_CONTRAST, (shape, fill)
    assert num_texts > 5


@pytest.mark.parametrize("name", PICTURES)
def test_texts_lie_over_no_box_but_their_own(name: str) -> None:
    found = [*shapes(ET.fromstring(PICTURES[name]), "light")]
    boxes = [shape for shape in found if not shape.text]
    for text in (shape for shape in found if shape.text):
        if not any(box.holds(text.left, text.top) and box.holds(text.right, text.bottom) for box in boxes):
            assert not any(text.overlaps(box) for box in boxes), text


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_say_what_they_show(name: str) -> None:
    root = ET.fromstring(PICTURES[name])
    title, about = root.findtext(SVG + "title", ""), root.findtext(SVG + "desc", "")
    assert (root.get("role"), root.get("aria-label")) == ("img", title) and title
    assert about.endswith(".") and len(about) > 60 and about != title


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_pictures_fit_a_column(name: str) -> None:
    """A page's column is about 800 pixels wide: a wider picture is scaled down, and so are its letters."""
    assert float(ET.fromstring(COMMITTED[name]).get("width", "")) <= 830


@given(low=st.floats(0, 1e6), length=st.floats(1e-6, 1e9), most=st.integers(2, 20))
def test_ticks_are_round(low: float, length: float, most: int) -> None:
    high = low + length
    ticks = round_ticks(low, high, most=most)
    assert len(ticks) <= most
    if len(ticks) < 2:
        assert most < 5, "an axis with room for five ticks has two"
        return
    steps = [after - before for before, after in zip(ticks, ticks[1:], strict=False)]
    step = steps[0]
    assert all(one == pytest.approx(step, rel=1e-3, abs=1e-9 * high) for one in steps)
    factor = step / 10.0 ** math.floor(math.log10(step * 1.0001))
    assert any(factor == pytest.approx(known, rel=1e-2) for known in (1, 2, 2.5, 5, 10))
    assert low - 1e-6 * step <= ticks[0] and ticks[-1] <= high + 1e-6 * step
    assert ticks[0] - low <= step * 1.001 and high - ticks[-1] <= step * 1.001


def test_a_step_of_an_axis_is_the_smallest_that_fits() -> None:
    assert round_ticks(0, 12, most=13) == [float(number) for number in range(13)]
    assert round_ticks(0, 12, most=12)[1] == 2.0
    assert round_ticks(0, 25, most=12)[1] == 2.5
    assert round_ticks(0, 0, most=12) == [0]


def test_earlier_pictures_are_known() -> None:
    """`draw` without --output replaces those of an earlier version, too."""
    first = "<style>\ntext { font-family: Helvetica, Arial, sans-serif; font-size: 12px; fill: "
    assert is_document(f'<svg role="img">\n<title>--vtp-size-list 1,2</title>\n{first}#737b85; }}\n')
    assert not is_document("<svg>\n<style>\ntext { fill: red; }\n")
