"""Make the documents' site in out/site/VERSION, with Sphinx's warnings as errors, and let out/site lead to the newest.

python scripts/make_site.py [--to out/site]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from packaging.version import InvalidVersion, Version
from sphinx.cmd.build import build_main

ROOT = Path(__file__).resolve().parents[1]
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={address}">
<link rel="icon" href="{icon}">
<title>vtp_plugin</title>
</head>
<body><p><a href="{address}">{title}</a></p></body>
</html>
"""
HOME, ICON = "docs/index.html", "_static/favicon.svg"


def main() -> int:
    """Do what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--to", type=Path, default=ROOT / "out" / "site", help="folder of all versions (default: out/site)"
    )
    folder = parser.parse_args().to.resolve()
    sys.path.insert(0, str(ROOT))
    from vtp_plugin import __version__

    started = time.monotonic()
    site = folder / __version__
    if (site / ".buildinfo").exists():  # Sphinx has made it, and would leave pages there that are gone
        shutil.rmtree(site)
    command = ["-W", "--keep-going", "-q", "-b", "html", "-c", str(ROOT / "docs"), "-d", str(folder / ".doctrees")]
    if code := build_main([*command, str(ROOT), str(site)]):
        return code
    (site / "index.html").write_text(PAGE.format(address=HOME, icon=ICON, title=f"vtp_plugin {__version__}"))
    newest = max(versions(folder))
    (folder / "index.html").write_text(
        PAGE.format(address=f"{newest}/{HOME}", icon=f"{newest}/{ICON}", title=f"vtp_plugin {newest}")
    )
    print(f"wrote {site} in {time.monotonic() - started:.0f} s; open {folder / 'index.html'}")
    return 0


def versions(folder: Path) -> list[Version]:
    """Return the versions that have a folder here."""
    found = []
    for path in folder.iterdir():
        try:
            found.append(Version(path.name))
        except InvalidVersion:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
