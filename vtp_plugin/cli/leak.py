"""``leak``: how many tokens can be read from the states that cross a cut, on a small model or in a recorded run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vtp_plugin.cli.command_base import Parser, add_json_flag, print_answer, read_sizes
from vtp_plugin.errors import ConfigError
from vtp_plugin.host.versions import find_host
from vtp_plugin.report.page.report_page import TextTable
from vtp_plugin.util.text import own_command

if TYPE_CHECKING:
    from vtp_plugin.leak.measure import Leak

_WHAT_IT_CANNOT = (
    "A share above those of the controls shows that a cut leaks. A low one does not show that it does not: a better "
    "attack may exist. The figures of a small model do not carry over to a larger one."
)


def add_arguments(parser: Parser) -> None:
    """Declare the flags."""
    parser.epilog = _WHAT_IT_CANNOT
    parser.add_argument(
        "--edge-layers", type=read_sizes, default=[1, 2, 4], metavar="1,2,4", help="layers before the cut; 1,2,4"
    )
    parser.add_argument("--num-layers", type=int, default=6, metavar="N", help="layers of the small model; 6")
    parser.add_argument("--width", type=int, default=128, metavar="H", help="its width; 128")
    parser.add_argument("--held-out", type=int, default=200, metavar="N", help="sequences that are read; 200")
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="epochs of its training; 4")
    parser.add_argument(
        "--recorded", type=Path, metavar="FOLDER", help="in its place: files of a run with --vtp-record-crossing"
    )
    parser.add_argument(
        "--tokens", type=Path, metavar="FILE.npy", help="with --recorded: the tokens of these activations, [N, S]"
    )
    add_json_flag(parser)


def run(options: argparse.Namespace) -> None:
    """Measure, and print what was found."""
    if options.unknown:
        raise ConfigError(f"{options.unknown[0]} is unknown; see: {own_command()} leak --help")
    if (options.recorded is None) is not (options.tokens is None):
        raise ConfigError("--recorded and --tokens belong together; give both, or neither")
    find_host()  # one line where torch is missing
    from vtp_plugin.leak.measure import measure, measure_recorded
    from vtp_plugin.leak.small_gpt import GPTSizes

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.recorded is not None:
        leak = measure_recorded(options.recorded, options.tokens)
    else:
        for name in ("num_layers", "width", "held_out", "epochs"):
            if getattr(options, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}; must be at least 1")
        if options.width % 4:
            raise ConfigError(f"--width {options.width} is no multiple of the 4 heads; give another one")
        sizes = GPTSizes(
            num_layers=options.num_layers,
            width=options.width,
            num_held_out=options.held_out,
            num_epochs=options.epochs,
        )
        leak = measure(sizes, options.edge_layers, say)
    print_answer(options, leak, _text_of(leak))


def _text_of(leak: Leak) -> Iterator[str | TextTable]:
    header = ("start", "edge layers", "the reader's way", "share of tokens", "loss more")
    rows = [
        (
            *(one.start, str(one.edge_layers or ""), one.name, f"{one.share:.1%}"),
            "" if one.loss_more is None else f"{one.loss_more:+.4f}",
        )
        for one in leak.attacks
    ]
    yield TextTable.aligned(header, rows)
    yield f"naming the most frequent token: {leak.by_frequency:.1%}; trained inverter: {leak.num_trained_tokens} tokens"
    if leak.sizes is not None:
        yield (
            f"model: {leak.sizes.num_layers} layers of width {leak.sizes.width}, vocabulary {leak.sizes.vocab}; "
            f"{leak.sizes.num_held_out} sequences of {leak.sizes.length} tokens that no training saw"
        )
        yield f"control, start weights of one seed: {leak.one_seed} of {leak.num_of_seed} tokens"
    yield _WHAT_IT_CANNOT
