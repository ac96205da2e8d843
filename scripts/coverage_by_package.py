"""Say which share of the lines of each package the tests have run; ``make coverage`` calls it.

    python scripts/coverage_by_package.py out/coverage.json

The file is what ``coverage json`` writes. A package is a folder of ``vtp_plugin``, or ``patches``; the modules that lie
beside them count together.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any


def table(files: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each package, by its name, and one for all.

    >>> def file(lines, run):
    ...     return {"summary": {"num_statements": lines, "covered_lines": run}}
    >>> files = {"vtp_plugin/api.py": file(5, 4), "vtp_plugin/plan/a.py": file(3, 0), "patches/core/b.py": file(12, 12)}
    >>> print(*table(files), sep="\\n")
    package           lines    run  share
    patches              12     12   100%
    vtp_plugin            5      4    80%
    vtp_plugin/plan       3      0     0%
    all                  20     16    80%
    """
    lines, run = Counter[str](), Counter[str]()
    for path, file in files.items():
        for name in (_package(path), "all"):
            lines[name] += file["summary"]["num_statements"]
            run[name] += file["summary"]["covered_lines"]
    names = [*sorted(lines.keys() - {"all"}), "all"]
    width = max(map(len, names))
    yield f"{'package':{width}}  {'lines':>6} {'run':>6}  share"
    for name in names:
        yield f"{name:{width}}  {lines[name]:6} {run[name]:6}  {run[name] / max(lines[name], 1):5.0%}"


def _package(path: str) -> str:
    """Name the package that a file counts to.

    >>> _package("vtp_plugin/plan/layout/grid.py"), _package("vtp_plugin/api.py"), _package("patches/registry.py")
    ('vtp_plugin/plan', 'vtp_plugin', 'patches')
    """
    top, *rest = PurePosixPath(path).parts
    return f"{top}/{rest[0]}" if top == "vtp_plugin" and len(rest) > 1 else top


if __name__ == "__main__":
    print(*table(json.loads(Path(sys.argv[1]).read_text())["files"]), sep="\n")
