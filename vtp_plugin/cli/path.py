"""``path NAME``: where a file lies that another framework takes, for a command line such as ``$(vtp path swift)``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from vtp_plugin.cli.parser import Parser, fail

_SCRIPTS = {"swift-sft": "sft.py", "swift-pt": "pt.py"}
_NAMES = {
    "swift": "what `megatron sft --external_plugins` and `megatron pt --external_plugins` of ms-swift take",
    "swift-sft": "ms-swift's script of a rank that `megatron sft` starts, for `run`",
    "swift-pt": "the same of `megatron pt`",
}


def add_arguments(parser: Parser) -> None:
    """Declare the name."""
    text = "; ".join(f"{name}: {what}" for name, what in _NAMES.items())
    parser.add_argument("name", metavar="NAME", choices=[*_NAMES], help=text)


def run(options: argparse.Namespace) -> None:
    """Print the path."""
    if options.name == "swift":
        print(Path(__file__).resolve().parents[1] / "patches" / "swift" / "door" / "vtp_swift.py")
        return
    folder = next(_folders(), None)
    if folder is None:
        fail(f"path {options.name}: ms-swift cannot be found; it brings the script; pip install ms-swift==4.6.0")
    print(folder / _SCRIPTS[options.name])


def is_rank_script(script: Path) -> bool:
    """Tell whether a script is one of ms-swift's, which `megatron sft` or `megatron pt` starts on every rank."""
    return script.name in _SCRIPTS.values() and script.resolve().parent in _folders()


def _folders() -> Iterator[Path]:
    """Yield where ms-swift's scripts of ranks lie; nothing of it is imported."""
    spec = importlib.util.find_spec("swift")
    if spec is not None and spec.origin is not None:
        folder = Path(spec.origin).resolve().parent / "cli" / "_megatron"
        if folder.is_dir():
            yield folder
