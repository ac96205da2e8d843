"""``draw``: the pipeline as a picture."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from vtp_plugin.cli.bridges import add_bridge_flag, bridge_picture, read_modules, view_bridges
from vtp_plugin.cli.parser import OneFile, Parser, check_ending, print_json, write_file
from vtp_plugin.cli.run_flags import add_run_flags, read_run
from vtp_plugin.errors import ConfigError
from vtp_plugin.report.pictures.draw_pipeline import draw_pipeline
from vtp_plugin.report.pictures.svg import is_document

_OWN_NAME = "pipeline.svg"
_HEAD = 4096  # characters, in which title and style of a picture stand
_KEYS = """\
Keys of --json: output (file), num_stages, world_size, num_replicas; with --bridge: output, num_modules, world_size."""


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    add_run_flags(parser)
    add_bridge_flag(parser)
    parser.add_argument_group("Of the picture").add_argument(
        "--output",
        action=OneFile,
        type=Path,
        metavar="FILE.svg",
        help=f"file to write; default: {_OWN_NAME}, which replaces only an earlier picture",
    )
    parser.epilog = _KEYS


def run(options: argparse.Namespace) -> None:
    """Draw and write."""
    check_ending(options.output, {".svg": "picture"})
    output = options.output or _own_file()
    if options.bridge is not None:
        _draw_bridges(options, output)
        return
    flags = read_run(options)
    layout = flags.layout
    picture = draw_pipeline(
        layout,
        is_ring=flags.is_ring,
        rules=flags.rules,
        dp_mode=flags.replicas.mode,
        num_rings=flags.config.num_rings,
    )
    write_file(output, picture)
    if options.json:
        counts = {"num_stages": layout.num_stages, "world_size": layout.world_size}
        print_json("draw", {"output": str(output), **counts, "num_replicas": max(layout.dp_sizes)})
    else:
        print(f"wrote {output}")


def _own_file() -> Path:
    """Give the file that is written where none is named.

    Raises:
        ConfigError: there is another file of that name.
    """
    path = Path(_OWN_NAME)
    if os.path.lexists(path):
        text = ""
        if path.is_file():
            with path.open(encoding="ascii", errors="replace") as file:
                text = file.read(_HEAD)
        if not is_document(text):
            raise ConfigError(
                f"{path} is no picture of this plugin; without --output only such a picture is overwritten; "
                "give --output FILE.svg"
            )
    return path


def _draw_bridges(options: argparse.Namespace, output: Path) -> None:
    modules = read_modules(options)
    write_file(output, bridge_picture(modules, view_bridges(options, modules)))
    if options.json:
        counts = {"num_modules": len(modules), "world_size": modules[-1].ranks.stop}
        print_json("draw", {"output": str(output), **counts})
    else:
        print(f"wrote {output}")
