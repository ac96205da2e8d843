"""Photograph pages of the commands for docs/guides/report.md, in the system's Chromium (extra browser).

python scripts/draw_report.py [FOLDER]        by default into docs/pictures
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Name of the page, width and height in points, ground, and what is at its top.
SHOTS = {
    "report-simulate": ("simulate", 1000, 760, "light", "h1"),
    "report-search": ("search", 1100, 720, "dark", "#table"),
    "report-phone": ("plan", 400, 720, "light", "#memory"),
}


def main() -> None:
    """Write the pages, and a picture of each."""
    sys.path.insert(0, str(ROOT))
    from playwright.sync_api import sync_playwright

    from tests.support.report_pages import write_page_of

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/pictures"
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as made, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"], headless=True)
        for name, (page_name, width, height, ground, top) in SHOTS.items():
            size = {"width": width, "height": height}
            page = browser.new_page(viewport=size, color_scheme="dark" if ground == "dark" else "light")
            page.goto(write_page_of(page_name, Path(made)).as_uri())
            page.wait_for_selector(".picture[data-ready]")
            page.locator(top).evaluate("(one) => scrollTo(0, one.getBoundingClientRect().top - 30)")
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
