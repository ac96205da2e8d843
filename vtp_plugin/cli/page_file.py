"""Writes a page: fills the template with what a command knows (``--output FILE.html``)."""

from __future__ import annotations

import base64
import hashlib
import zlib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import vtp_plugin
from vtp_plugin.cli.boundaries import format_bytes
from vtp_plugin.cli.parser import write_file
from vtp_plugin.report import page as template
from vtp_plugin.report.page.report_page import ReportPage

if TYPE_CHECKING:
    from markupsafe import Markup

# A picture that is longer is packed, and the browser unpacks it: 64 stages with 64 microbatches are 1.7 MB.
_MOST_CHARACTERS = 200_000


def write_page(path: Path, page: ReportPage) -> None:
    """Write a page.

    Raises:
        ConfigError: it cannot be written.
    """
    # Names of users may have any letters.
    write_file(path, render(page).encode("ascii", "xmlcharrefreplace").decode())


def render(page: ReportPage) -> str:
    """Fill the template; every text is escaped but the pictures, which are markup of `vtp_plugin.report.pictures`."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    folder = files(template)
    html, style, script = ((folder / f"page.{ending}").read_text(encoding="ascii") for ending in ("html", "css", "js"))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["bytes"] = format_bytes
    environment.filters["picture"] = _picture
    # The browser runs this script and no other, whatever a name holds.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string(html).render(
        page=page, style=Markup(style), script=Markup(script), digest=digest, version=vtp_plugin.__version__
    )


def _picture(svg: str) -> Markup:
    """Give a picture as markup; a long one as text that the page's script unpacks."""
    from markupsafe import Markup

    if len(svg) <= _MOST_CHARACTERS:
        return Markup(svg)
    packed = base64.b64encode(zlib.compress(svg.encode(), 9)).decode()
    return Markup(f'<template class="packed">{packed}</template><noscript>This picture needs JavaScript.</noscript>')
