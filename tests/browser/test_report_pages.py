"""Pages of the commands in a browser: hover, zoom, copy, keyboard, narrow and wide, light and dark."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Opened
from tests.support.report_pages import COMMANDS, run_quietly, write_page_of

if TYPE_CHECKING:
    from playwright.sync_api import Page

NAMES = ("plan", "simulate", "search", "trace", "bridges", "long")
LEAST_CONTRAST = 4.5
READY = "document.querySelectorAll('.picture:not([data-ready])').length === 0"
WITH_BOXES = ".steps rect[data-title]"

# Of every text that is seen: its contrast with what lies below it. In a picture that is the last box painted before it.
CONTRASTS = """() => {
  const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map(
    (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const ground = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !one.getClientRects().length || one.closest("svg, script, template, style, noscript")) continue;
    found.push([text, ratio(parse(getComputedStyle(one).color), ground(one))]);
  }
  for (const svg of document.querySelectorAll(".picture svg")) {
    const shapes = [...svg.querySelectorAll("rect, text")].filter((one) => one.getClientRects().length)
      .map((one) => [one, one.getBoundingClientRect()]);
    shapes.forEach(([one, box], index) => {
      if (one.tagName !== "text") return;
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      let below = ground(svg);
      for (const [other, its] of shapes.slice(0, index)) {
        if (other.tagName !== "rect" || x < its.x || x > its.right || y < its.y || y > its.bottom) continue;
        const style = getComputedStyle(other), fill = parse(style.fill);
        below = over([...fill.slice(0, 3), fill[3] * Number(style.fillOpacity)], below);
      }
      found.push([one.textContent, ratio(parse(getComputedStyle(one).fill), below)]);
    });
  }
  return found;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All pages, as the commands write them."""
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_page_of(name, folder) for name in NAMES}


@pytest.fixture
def open_page(browser_page: Callable[..., Opened], pages: dict[str, Path]) -> Iterator[Callable[..., Page]]:
    """Open a page by its name, and wait until its pictures are there; nothing in it may open a dialog."""
    dialogs: list[str] = []

    def open_it(name: str, **how: object) -> Page:
        page = browser_page(pages[name].as_uri(), **how).page
        page.on("dialog", lambda dialog: dialogs.append(dialog.message))
        page.wait_for_function(READY)
        return page

    yield open_it
    assert dialogs == []


def shown_labels(page: Page) -> int:
    labels = "[...document.querySelectorAll('.steps text.number')]"
    return int(page.evaluate(f"{labels}.filter((one) => one.style.display !== 'none').length"))


def drawn(page: Page) -> None:
    """Wait until what was asked for is drawn, which is with the next frame."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def zoom_of(page: Page) -> float:
    drawn(page)
    return float(page.locator(".steps").get_attribute("data-zoom") or 0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("name", NAMES)
def test_all_fits_and_can_be_read(open_page: Callable[..., Page], name: str, width: int, scheme: str) -> None:
    """No page is wider than the screen, and every text stands out from what is below it."""
    page = open_page(name, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for one in page.locator("details").all():
        one.evaluate("(one) => { one.open = true; }")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 30
    assert [(text, round(ratio, 2)) for text, ratio in found if ratio < LEAST_CONTRAST] == []
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_pointing_names_a_mark(open_page: Callable[..., Page]) -> None:
    page, hint = open_page("simulate"), "#hint"
    assert page.locator(hint).is_hidden()
    page.hover(f"{WITH_BOXES} >> nth=20")
    assert re.fullmatch(r"\d[FB]\d+: [\d.]+ to [\d.]+", page.locator(hint).inner_text())
    page.hover("path.transfer >> nth=0", force=True)
    assert page.locator(hint).inner_text() == "rank 0 to rank 1"
    page.hover(".piece >> nth=0")
    assert re.fullmatch(r"stage 0, rank 0, weights: [\d.]+ GiB", page.locator(hint).inner_text())
    page.hover(".node span[data-title] >> nth=1")
    assert page.locator(hint).inner_text() == "rank 1, stage 1, node 1"
    page.hover("h1")
    assert page.locator(hint).is_hidden()
    # Titles of the browser's own would cover the hint.
    assert page.locator("svg * > title").count() == 0


def test_a_step_is_zoomed_by_keys_buttons_and_wheel(open_page: Callable[..., Page]) -> None:
    page = open_page("simulate")
    steps, window = page.locator(".steps"), page.locator(".window")
    before = shown_labels(page)
    steps.focus()
    assert zoom_of(page) == 1 and window.inner_text() == ""
    for _ in range(3):
        page.keyboard.press("+")
    assert zoom_of(page) == pytest.approx(1.5**3, rel=1e-3)
    first = window.inner_text()
    assert first.endswith(" ms") and shown_labels(page) > 0
    # A box is as long as it is said to be: its length over that of the axis is that of its time over the window.
    page.keyboard.press("ArrowRight")
    drawn(page)
    moved = window.inner_text()
    start, end = (float(each) for each in re.findall(r"[\d.]+", moved))
    assert start > float(first.split()[0])
    box, row = steps.locator("rect[data-title]:visible").all()[8], steps.locator('rect[class="row"]').first
    began, ended = (
        float(each) for each in re.findall(r"[\d.]+", (box.get_attribute("data-title") or "").partition(":")[2])
    )
    share = float(box.get_attribute("width") or 0) / float(row.get_attribute("width") or 1)
    assert share == pytest.approx((ended - began) / (end - start), abs=0.004)
    ticks = [float(text.split()[0]) for text in steps.locator("text.tick").all_text_contents()]
    assert ticks == sorted(ticks) and 3 <= len(ticks) <= 13 and start <= ticks[0] and ticks[-1] <= end * 1.001
    page.keyboard.press("0")
    assert zoom_of(page) == 1 and shown_labels(page) == before
    page.click("button[data-zoom=in]")
    page.click("button[data-zoom=in]")
    page.click("button[data-zoom=out]")
    assert zoom_of(page) == pytest.approx(1.5, rel=1e-3)
    page.click("button[data-zoom=all]")
    # The wheel alone scrolls the page; with Ctrl it zooms, and what is below the pointer stays there.
    middle = steps.locator("svg").bounding_box()
    assert middle is not None
    page.mouse.move(middle["x"] + middle["width"] / 2, middle["y"] + middle["height"] / 2)
    page.mouse.wheel(0, -200)
    assert zoom_of(page) == 1
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    assert zoom_of(page) > 1.5
    dragged = window.inner_text()
    page.mouse.down()
    page.mouse.move(middle["x"] + middle["width"] / 2 + 80, middle["y"] + middle["height"] / 2, steps=4)
    page.mouse.up()
    drawn(page)
    assert float(window.inner_text().split()[0]) < float(dragged.split()[0])


def test_keys_name_one_box_after_the_other(open_page: Callable[..., Page]) -> None:
    page = open_page("trace")
    page.locator(".steps").focus()
    said = []
    for key in "nnp":
        page.keyboard.press(key)
        drawn(page)
        said.append(page.locator("#hint").inner_text())
    assert said[0].startswith("forward 0F0: 0 to 10") and said[2] == said[0] != said[1]
    assert page.locator("rect.named").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("#hint").is_hidden()


def test_commands_are_copied(open_page: Callable[..., Page], tmp_path: Path) -> None:
    page = open_page("plan")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    nodes = json.loads(run_quietly(*COMMANDS["plan"], "--json", "--output", str(tmp_path / "x.html")))["launch"][
        "nodes"
    ]
    commands = [command for node in nodes for command in node["commands"]]
    for number, command in enumerate(commands):
        page.locator(".copy").nth(number).click()
        page.wait_for_function(
            "number => document.querySelectorAll('.copy')[number].textContent === 'copied'", arg=number
        )
        assert page.evaluate("navigator.clipboard.readText()") == command


def test_a_copy_works_where_the_clipboard_is_closed(open_page: Callable[..., Page]) -> None:
    page = open_page("plan")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(new Error('closed')); }")
    page.locator(".copy").first.click()
    page.wait_for_function("getSelection().toString().startsWith('torchrun ')")


def test_everything_is_reached_by_keys_and_seen_to_be(open_page: Callable[..., Page]) -> None:
    page = open_page("search")
    number = page.locator("a, button, summary, [tabindex='0']").count()
    seen = []
    for _ in range(number):
        page.keyboard.press("Tab")
        seen.append(
            page.evaluate(
                "(() => { const one = document.activeElement, style = getComputedStyle(one);"
                " return [one.outerHTML.slice(0, 60), style.outlineStyle, parseFloat(style.outlineWidth)]; })()"
            )
        )
    assert len({text for text, _, _ in seen}) > number / 3 and number > 15
    assert [text for text, style, width in seen if style != "solid" or width < 2] == []
    assert page.locator("[role=region]:not([aria-label]), button:not([aria-label])").all_inner_texts() == ["whole step"]


def test_a_long_step_is_unpacked(open_page: Callable[..., Page], pages: dict[str, Path]) -> None:
    """Of 16 stages with 64 microbatches every compute is there, and can be zoomed to its number."""
    assert "<rect" not in html.unescape(pages["long"].read_text()).partition('id="step"')[2].partition("</section>")[0]
    page = open_page("long")
    assert page.locator(WITH_BOXES).count() == 2 * 16 * 64
    assert shown_labels(page) == 0
    page.locator(".steps").focus()
    for _ in range(8):
        page.keyboard.press("+")
    assert zoom_of(page) > 10 and shown_labels(page) > 50
