"""Headless Chromium for the tests of pages: the system's own (`apt-get install chromium`), driven by playwright.

Where one of both is missing the tests are skipped; with VTP_TEST_BROWSER=required, as `.ci/run` sets it, they fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.hosts import ROOT
from tests.support.pace import pace

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@dataclass(frozen=True, slots=True)
class Opened:
    """A page in the browser, and what has gone wrong in it so far: console errors, exceptions, files not found."""

    page: Page
    errors: list[str] = field(default_factory=list)


def missing(reason: str) -> None:
    """Skip the test, or fail it where the tests must not be skipped."""
    if os.environ.get("VTP_TEST_BROWSER") == "required":
        pytest.fail(f"{reason} (VTP_TEST_BROWSER=required)", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The system's Chromium, started once for all tests of a process."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if find_spec("playwright") is None:
        missing("needs playwright: pip install -e '.[browser]'")
    if path is None:
        missing("needs Chromium: apt-get install --no-install-recommends chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"], headless=True)
        yield browser
        browser.close()


@pytest.fixture
def browser_page(chromium: Browser) -> Iterator[Callable[..., Opened]]:
    """Open a file:// or http:// address, by default 1,280 x 800 points and light; no page may have an error at the end.

    `browser_page(path.as_uri(), width=400, height=800, color_scheme="dark")` returns playwright's page as `.page`. What
    a test has expected it removes from `.errors`.
    """
    opened: list[Opened] = []

    def open_page(address: str, *, width: int = 1280, height: int = 800, color_scheme: str = "light") -> Opened:
        page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=color_scheme)
        found = Opened(page)
        page.on("console", lambda line: found.errors.append(line.text) if line.type == "error" else None)
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("requestfailed", lambda request: found.errors.append(f"{request.url}: {request.failure}"))
        page.set_default_timeout(300_000)  # ms, against hangs only
        opened.append(found)
        page.goto(address)
        return found

    yield open_page
    for found in opened:
        found.page.context.close()
    # What is still on its way when the browser leaves a page is no error of the page.
    errors = [error for found in opened for error in found.errors if not error.endswith("net::ERR_ABORTED")]
    assert errors == []


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, as `make site` makes it; a warning of Sphinx fails here."""
    if find_spec("furo") is None:
        missing("needs Sphinx, MyST and furo: pip install -e '.[site]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "scripts/make_site.py", "--to", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800 * pace(), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def served_site(site: Path) -> Iterator[str]:
    """The address of a server of the site."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        server.handle_error = lambda *_: None  # the browser left a page before it was whole
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
