"""A folder that an example fills: an earlier run's is replaced, anything else is left alone."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def begin(folder: Path, maker: str) -> None:
    """Make an empty folder, in the place of one that this example has made.

    Args:
        folder: the folder.
        maker: name of the example, which a file in the folder says.
    """
    mark = folder / f".made-by-{maker}"
    is_empty = folder.is_dir() and not any(folder.iterdir())
    if (folder.exists() or folder.is_symlink()) and not is_empty and not mark.is_file():
        rule = f"only a folder with {mark.name} is replaced"
        sys.exit(f"{folder} holds something else; {rule}; give another folder, or remove this one")
    try:
        if mark.is_file():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as problem:
        sys.exit(f"{folder} cannot be written: {problem}")
