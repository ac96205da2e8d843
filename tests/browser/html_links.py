"""Which links of a folder of HTML pages lead nowhere: to no file, or to an anchor that the page does not have."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class _Page(HTMLParser):
    """Collects the anchors of a page, and the addresses that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)
            elif value and name in ("href", "src"):
                self.addresses.append(value)


def broken_links(folder: Path) -> list[str]:
    """Return `page: address` for every link inside the folder that does not resolve; other sites are not asked."""
    pages = {path: _read(path) for path in folder.resolve().rglob("*.html")}
    return sorted(
        f"{path.relative_to(folder.resolve())}: {address}"
        for path, page in pages.items()
        for address in set(page.addresses)
        if not _resolves(path, address, pages)
    )


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text())
    return page


def _resolves(path: Path, address: str, pages: dict[Path, _Page]) -> bool:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    anchor = unquote(parts.fragment)
    if target not in pages:
        return target.is_file() and not anchor
    return not anchor or anchor in pages[target].anchors
