"""``path NAME``: where a file lies that another framework takes, for a command line such as ``$(vtp path swift)``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from vtp_plugin.cli.command_base import Parser, fail

_DOOR = "door/vtp_swift.py"
_SCRIPTS = ("sft", "pt")
_HELP = (
    "swift: what `megatron sft` of ms-swift takes by --external_plugins; swift-sft, swift-pt: its scripts, for `run`"
)


def add_arguments(parser: Parser) -> None:
    """Declare the name."""
    names = ["swift", *(f"swift-{name}" for name in _SCRIPTS)]
    parser.add_argument("name", metavar="NAME", choices=names, help=_HELP)


def run(options: argparse.Namespace) -> None:
    """Print the path."""
    if options.name == "swift":
        print(Path(__file__).resolve().parent / _DOOR)
        return
    folder = next(_folders(), None)
    if folder is None:
        fail(f"path {options.name}: ms-swift cannot be found; it brings the script; pip install ms-swift==4.6.0")
    print(folder / f"{options.name.removeprefix('swift-')}.py")


def is_rank_script(script: Path) -> bool:
    """Tell whether a script is one of ms-swift's, which `megatron sft` or `megatron pt` starts on every rank."""
    return script.stem in _SCRIPTS and script.resolve().parent in _folders()


def _folders() -> Iterator[Path]:
    """Yield where ms-swift's scripts of ranks lie; nothing of it is imported."""
    spec = importlib.util.find_spec("swift")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).resolve().parent / "cli" / "_megatron"
        if folder.is_dir():
            yield folder
