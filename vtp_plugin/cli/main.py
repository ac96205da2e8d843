"""The commands, and what they share: a bad flag or value gives one line and exit code 2."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import vtp_plugin
from vtp_plugin.cli import checkpoint, doctor, draw, plan, profile, rendezvous, run, search, simulate, trace
from vtp_plugin.cli.parser import Parser, fail
from vtp_plugin.errors import VtpError

_COMMANDS = {
    "run": (run.add_arguments, run.run, "run a Megatron training script under the plugin; --help lists its flags"),
    "plan": (plan.add_arguments, plan.run, "print the ranks of each stage and what crosses, without starting anything"),
    "draw": (draw.add_arguments, draw.run, "draw the pipeline as an SVG file"),
    "profile": (
        profile.add_arguments,
        profile.run,
        "time the parts of a model on one card, or the links between all, for search",
    ),
    "search": (search.add_arguments, search.run, "find the layouts of a cluster whose steps are shortest"),
    "simulate": (simulate.add_arguments, simulate.run, "simulate one step; nothing is measured"),
    "checkpoint": (
        checkpoint.add_arguments,
        checkpoint.run,
        "show, verify, compare or rewrite checkpoints, without a run",
    ),
    "trace": (trace.add_arguments, trace.run, "join the files of run --vtp-trace, beside the plan of the run"),
    "rendezvous": (
        rendezvous.add_arguments,
        rendezvous.run,
        "keep the rendezvous of elastic torchrun, on one address of this machine",
    ),
    "doctor": (doctor.add_arguments, doctor.run, "try the patches; print versions, platform, interfaces and a verdict"),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: the words after the program's name; default: those of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["run"]:
        _obey(words)  # a script's broken pipe is its own affair
        return
    try:
        try:
            _obey(words)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who read has gone, as `head` does. What is left in the buffer must not be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _obey(words: list[str]) -> None:
    options, unknown = _parser().parse_known_args(words)
    options.words, options.unknown = words, unknown
    try:
        options.command(options)
    except VtpError as error:
        if options.command is run.run:
            raise  # the plugin's exception hook prints the line, and tells the other ranks
        fail(str(error))


def _parser() -> Parser:
    parser = Parser(prog="python -m vtp_plugin", description=vtp_plugin.__doc__)
    parser.add_argument("--version", action="version", version=f"vtp_plugin {vtp_plugin.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, (add_arguments, command, text) in _COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text)
        add_arguments(one)
        one.set_defaults(command=command)
    return parser
