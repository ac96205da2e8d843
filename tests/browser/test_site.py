"""The site: every link resolves, every public name is there, its search and its navigation work in a browser."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.browser.html_links import broken_links
from tests.support.hosts import ROOT
from vtp_plugin import __version__
from vtp_plugin.util.typed_json import read_toml

QUESTIONS = read_toml(Path(__file__).with_name("questions.toml"))["question"]
NUM_RESULTS = 5
SIZES = pytest.mark.parametrize("width", [1280, 400])
SCHEMES = pytest.mark.parametrize("color_scheme", ["light", "dark"])


def test_every_link_and_anchor_resolves(site: Path) -> None:
    assert broken_links(site) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there"></a><a href="b.html#gone"></a><img src="gone.svg">')
    (tmp_path / "b.html").write_text('<h1 id="there"></h1><a href="https://example.org/x"></a><a href="../a.html"></a>')
    assert broken_links(tmp_path) == ["a.html: b.html#gone", "a.html: gone.svg", "b.html: ../a.html"]


def test_every_public_name_is_documented(site: Path) -> None:
    listed = (ROOT / "docs/reference/public.md").read_text()
    rows = re.findall(r"^\| `(vtp_plugin[\w.]*)` \| (`.+`) \|$", listed, re.MULTILINE)
    names = {f"{module}.{name}" for module, names in rows for name in re.findall(r"`(\w+)`", names)}
    inventory = (site / __version__ / "objects.inv").read_bytes().split(b"\n", 4)[4]
    known = {line.split()[0] for line in zlib.decompress(inventory).decode().splitlines()}
    assert len(names) > 40 and names - known == {"vtp_plugin.__version__"}


def test_llms_txt_lists_every_page_with_a_sentence(site: Path) -> None:
    lines = (site / __version__ / "llms.txt").read_text().splitlines()
    assert lines[0] == f"# vtp_plugin {__version__}" and lines[2].startswith("> ")
    found = [re.fullmatch(r"- \[(.+)\]\((.+)\): (.+)", line) for line in lines[4:]]
    assert all(found)
    addresses = {match[2] for match in found if match}
    pages = {path.relative_to(ROOT).with_suffix(".html").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages <= addresses
    assert [name for name in addresses if not (site / __version__ / name).exists()] == []


def results(page: Any) -> list[str]:
    """Wait until the search has ended; return the addresses of what it shows, best first."""
    page.wait_for_function("document.querySelector('#search-results h2')?.textContent === 'Search Results'")
    page.wait_for_function("!/Searching|Preparing/.test(document.querySelector('#search-results').textContent)")
    return page.eval_on_selector_all("#search-results ul.search > li > a", "links => links.map(link => link.pathname)")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question["words"].replace(" ", "-"))
def test_a_question_is_answered_by_the_first_results(
    question: dict[str, Any], browser_page: Callable[..., Any], served_site: str
) -> None:
    page = browser_page(f"{served_site}/index.html").page
    page.wait_for_url("**/docs/index.html")
    page.locator(".sidebar-search").fill(question["words"])
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html*")
    found = [re.sub(r".*/docs/|\.html$", "", address) for address in results(page)[:NUM_RESULTS]]
    print(question["words"], found)
    assert set(found) & set(question["pages"]), found


@SIZES
@SCHEMES
def test_one_finds_a_guide_by_clicking(
    browser_page: Callable[..., Any], served_site: str, width: int, color_scheme: str
) -> None:
    page = browser_page(f"{served_site}/index.html", width=width, color_scheme=color_scheme).page
    page.wait_for_url("**/docs/index.html")
    if width < 1000:
        page.locator(".mobile-header label[for=__navigation]").first.click()
    page.locator(".sidebar-tree").get_by_role("link", name="Guides", exact=True).click()
    page.wait_for_url("**/guides/index.html")
    page.locator("article").get_by_role("link", name="Train over an edge and a cloud").click()
    page.wait_for_url("**/edge-cloud.html")
    assert page.locator("h1").inner_text().startswith("Edge and cloud")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3])) / 3
    assert brightness > 200 if color_scheme == "light" else brightness < 60


@pytest.mark.timeout(1800)  # 82 pages; 526 s at a load of 15
def test_no_page_is_wider_than_a_telephone_or_has_an_error(browser_page: Callable[..., Any], site: Path) -> None:
    page = browser_page((site / __version__ / "search.html").as_uri(), width=400, color_scheme="dark").page
    pages = sorted((site / __version__ / "docs").rglob("*.html"))
    assert len(pages) > 60
    wide = []
    for path in pages:
        page.goto(path.as_uri())
        if page.evaluate("document.documentElement.scrollWidth") > 400:
            wide.append(path.name)
    assert wide == []


def test_the_table_of_options_is_whole_on_a_wide_screen(browser_page: Callable[..., Any], site: Path) -> None:
    page = browser_page((site / __version__ / "docs/reference/megatron-options.html").as_uri()).page
    sizes = page.eval_on_selector_all(".table-wrapper", "all => all.map(one => [one.scrollWidth, one.clientWidth])")
    assert sizes and all(scrolled <= shown for scrolled, shown in sizes), sizes


def test_home_fits_a_screen(browser_page: Callable[..., Any], site: Path) -> None:
    page = browser_page((site / __version__ / "docs/index.html").as_uri()).page
    last = page.locator("article p").last.bounding_box()
    assert last["y"] + last["height"] <= 800


def test_commands_can_be_copied(browser_page: Callable[..., Any], served_site: str) -> None:
    page = browser_page(f"{served_site}/{__version__}/docs/start/install.html").page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    block = page.locator("div.highlight", has_text="vtp doctor").first
    block.hover()
    block.locator("button.copybtn").click()
    page.wait_for_function("navigator.clipboard.readText().then(text => text.trim() === 'vtp doctor')")
