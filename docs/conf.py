"""How Sphinx makes the site out of the Markdown files of this tree: `make site`, by scripts/make_site.py.

The source folder is the root of the tree, so links between docs/, examples/ and CONTRIBUTING.md are those of the files.

References into torch's and Megatron's own sites are plain links. Sphinx could resolve names with an inventory of those
sites (`objects.inv`) that is kept here; a search of the package index by name found no package that ships one.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vtp_plugin import __version__  # noqa: E402

project = "vtp_plugin"
author = copyright = "The vtp_plugin maintainers"
version = release = __version__
html_title = f"vtp_plugin {release}"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "scripts.site_pages",
]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "examples/**.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
exclude_patterns = [".*", "out", "build", "dist", "**/__pycache__"]
html_theme = "furo"
html_favicon = "pictures/favicon.svg"
html_copy_source = False
html_static_path = html_css_files = ["site.css"]

myst_enable_extensions = ["html_image"]
# Links name headings as code hosts do.
myst_heading_anchors = 4
# Commands are indented, and carry no name of a language.
highlight_language = "none"

autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
