"""Renews a toy's patch: ``python -m tests.toys.renew unpack NAME``, then ``pack NAME``; see the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.rules.import_rules import ROOT
from tests.toys import copies

HELP = "python -m tests.toys.renew unpack NAME | pack NAME; names: the patches in tests/toys, or a new one"


def folder(name: str) -> Path:
    if not name.replace("-", "_").isidentifier():  # it is removed
        raise SystemExit(HELP)
    return ROOT / "out" / "toys" / name


def unpack(name: str) -> None:
    """Make a copy with what fits of the toy."""
    shutil.rmtree(folder(name), ignore_errors=True)
    copies.copy_tree(folder(name))
    if (copies.PATCHES / f"{name}.patch").is_file():
        copies.apply(name, folder(name), as_far_as_it_fits=True)
    rejected = [str(path.relative_to(ROOT)) for path in sorted(folder(name).rglob("*.rej"))]
    print(f"{folder(name)}; does not fit: {', '.join(rejected) or 'nothing'}")


def pack(name: str) -> None:
    """Write the patch, as ruff formats its code and with the generated documents of the copy."""
    root = folder(name)
    env = {**os.environ, "PYTHONPATH": str(root)}
    code = [file for file in copies.touched(copies.difference(root)) if file.endswith(".py")]
    for words in (["ruff", "check", "--fix"], ["ruff", "format"]):
        subprocess.run([sys.executable, "-m", *words, "--no-respect-gitignore", *code], cwd=root, env=env, check=True)
    subprocess.run([sys.executable, "scripts/make_docs.py"], cwd=root, env=env, check=True)
    patch = copies.difference(root)
    (copies.PATCHES / f"{name}.patch").write_text(patch)
    print("\n".join(sorted(copies.touched(patch))))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("unpack", "pack"):
        raise SystemExit(HELP)
    {"unpack": unpack, "pack": pack}[sys.argv[1]](sys.argv[2])
