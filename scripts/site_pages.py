"""What the site has beyond Sphinx: a page for each file or folder that a document links to, and llms.txt.

An extension of Sphinx, named in docs/conf.py.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx

FOLDER = "tree"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register what this file does."""
    app.connect("doctree-read", name_pages, priority=400)  # before Sphinx collects what is to be downloaded
    app.connect("doctree-read", link_to_files, priority=400)
    app.connect("html-collect-pages", pages_of_files)
    app.connect("html-page-context", name_language)
    app.connect("build-finished", write_llms)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def name_pages(app: Sphinx, doctree: nodes.document) -> None:
    """Let a link whose text is the name of a file, as code hosts show it, have the title of its page or section."""
    for node in doctree.findall(addnodes.pending_xref):
        if node["reftype"] == "myst" and node["refdomain"] == "doc" and node.astext().endswith(".md"):
            node["refexplicit"] = False


def link_to_files(app: Sphinx, doctree: nodes.document) -> None:
    """Let links to files and folders that are no documents lead to pages that show them."""
    here = Path(app.srcdir, app.env.docname).parent
    for node in [*doctree.findall(addnodes.pending_xref), *doctree.findall(addnodes.download_reference)]:
        if node["reftype"] != "myst":
            continue
        path = _file_of(app, node, here)
        if path is not None:
            app.env.note_dependency(str(path))
            address = app.builder.get_relative_uri(app.env.docname, f"{FOLDER}/{path.relative_to(app.srcdir)}")
            link = nodes.reference("", "", *node.children, internal=True, refuri=address)
            node.replace_self(link)
            _linked(app).setdefault(app.env.docname, set()).add(path)


def _file_of(app: Sphinx, node: nodes.Element, here: Path) -> Path | None:
    """Return the file or folder that a link names, None where it is a document or nothing."""
    target = node["reftarget"]
    if node["refdomain"] == "doc":
        return None if target in app.env.found_docs else Path(app.srcdir, f"{target}.md")
    path = Path(os.path.normpath(here / target))
    return path if path.exists() and path.is_relative_to(app.srcdir) else None


def _linked(app: Sphinx) -> dict[str, set[Path]]:
    """Return which files each document links to; the environment keeps it for the next build."""
    return app.env.__dict__.setdefault("vtp_linked_files", {})


def pages_of_files(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Show every file that is linked, and those of folders."""
    found = {path for paths in _linked(app).values() for path in paths}
    queue = sorted(found)
    while queue:
        path = queue.pop()
        name = path.relative_to(app.srcdir)
        inside = sorted(child for child in path.iterdir() if child.name[0] not in "._") if path.is_dir() else []
        queue.extend(set(inside) - found)
        found.update(inside)
        body = _listing(name, inside) if path.is_dir() else _shown(path)
        yield f"{FOLDER}/{name}", {"title": str(name), "body": f"<h1>{html.escape(str(name))}</h1>{body}"}, "page.html"


def _listing(name: Path, inside: list[Path]) -> str:
    rows = [f'<li><a href="{name.name}/{child.name}.html">{child.name}</a></li>' for child in inside]
    return f"<ul>{''.join(rows)}</ul>"


def _shown(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return f'<div class="highlight">{highlight(path.read_text(), lexer, HtmlFormatter(nowrap=False))}</div>'


def name_language(app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: object) -> None:
    """Name the language of a page: browsers take Chinese signs in English for Japanese ones."""
    if name.startswith("docs/zh/"):
        context["language"] = "zh-CN"


def write_llms(app: Sphinx, exception: Exception | None) -> None:
    """Write llms.txt: what this is, and every page with its first sentence."""
    if exception is not None or app.builder.format != "html":
        return
    lines = [f"# {app.config.project} {app.config.release}", "", f"> {_first_sentence(app, app.config.root_doc)}", ""]
    for name in sorted(app.env.found_docs):
        address = app.builder.get_target_uri(name)
        lines.append(f"- [{app.env.titles[name].astext()}]({address}): {_first_sentence(app, name)}")
    Path(app.outdir, "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(app: Sphinx, name: str) -> str:
    """Return the first sentence of a document's first paragraph."""
    paragraphs = app.env.get_doctree(name).findall(nodes.paragraph)
    texts = (" ".join(node.astext().split()) for node in paragraphs if isinstance(node.parent, nodes.section))
    # A line of links is none.
    return next(
        (re.split(r"(?<=[.?!])\s|(?<=\u3002)", text)[0] for text in texts if re.search(r"[.:?!\u3002]", text)), ""
    )
