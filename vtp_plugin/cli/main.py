"""The commands, and what they share: a bad flag or value gives one line and exit code 2."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

import vtp_plugin
from vtp_plugin.cli import (
    certify,
    checkpoint,
    doctor,
    leak,
    link_actions,
    path,
    plan,
    profile,
    run,
    search,
    simulate,
    trace,
)
from vtp_plugin.cli.command_base import Parser, command_of, fail
from vtp_plugin.cli.terminal import on_standard_output
from vtp_plugin.errors import VtpError
from vtp_plugin.host.versions import HOSTS
from vtp_plugin.util.text import own_command, question

_COMMANDS = {
    "run": (run.add_arguments, run.run, "run a Megatron training script under the plugin"),
    "path": (path.add_arguments, path.run, "print where a file lies that another framework takes"),
    "plan": (plan.add_arguments, plan.run, "print the ranks of each stage and what crosses, without starting anything"),
    "draw": (plan.add_draw_arguments, plan.run_draw, "draw the pipeline as an SVG file"),
    "profile": (
        profile.add_arguments,
        profile.run,
        "time the parts of a model on one device, or the links between all, for search",
    ),
    "search": (search.add_arguments, search.run, "find the layouts of a cluster whose steps are shortest"),
    "simulate": (simulate.add_arguments, simulate.run, "simulate one step; nothing is measured"),
    "checkpoint": (
        checkpoint.add_arguments,
        checkpoint.run,
        "show, verify, compare or rewrite checkpoints, without a run",
    ),
    "certify": (
        certify.add_arguments,
        certify.run,
        "train on the layouts that fit these machines, and compare each with the uniform run",
    ),
    "leak": (leak.add_arguments, leak.run, "measure how many tokens can be read from what crosses a cut"),
    "trace": (trace.add_arguments, trace.run, "join the files of run --vtp-trace, beside the plan of the run"),
    "rendezvous": (
        link_actions.add_rendezvous_arguments,
        link_actions.run_rendezvous,
        "keep the rendezvous of elastic torchrun, on one address of this machine",
    ),
    "link": (
        link_actions.add_arguments,
        link_actions.run,
        "an encrypted link between sites that nobody else can reach",
    ),
    "doctor": (doctor.add_arguments, doctor.run, "try the patches; print versions, platform, interfaces and a verdict"),
}

# What brings a package, where its own name is not enough.
_INSTALL = {
    "jinja2": "vtp-plugin[report]",
    "megatron": "megatron-core",
    "safetensors": "vtp-plugin[hf]",
    "torch": f"torch{HOSTS[-1].torch}",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        argv: command-line arguments behind the program's name; by default those of the process.
    """
    command_line = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if command_line[:1] == ["run"]:
        _obey(command_line)  # a script's broken pipe is its own affair
        return
    try:
        try:
            with on_standard_output():
                _obey(command_line)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Who read has gone, as `head` does. What is left in the buffer must not be written when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _obey(argv: list[str]) -> None:
    _require_command(argv[0])
    options, unknown = _parser().parse_known_args(argv)
    options.argv, options.unknown = argv, unknown
    try:
        options.command(options)
    except Exception as error:
        if options.command is run.run or isinstance(error, BrokenPipeError):
            raise  # the plugin's exception hook prints the line, and tells the other ranks
        if isinstance(error, VtpError):
            fail(str(error))
        if isinstance(error, ImportError):
            fail(_missing(error, command_of(argv)))
        if isinstance(error, OSError) and error.filename is not None:
            fail(
                f"{error.filename} cannot be read or written: {error.strerror}; the command needs it; see to its access"
            )
        traceback.print_exc()
        sys.exit(2)  # not 1, with which some commands say that something differs


def _require_command(word: str) -> None:
    """Leave with a line if the first word is no command: a script, or a misspelt one."""
    if word.startswith("-") or word in _COMMANDS:
        return
    if word.endswith(".py"):
        fail(f"{word} stands where a command is expected; write `run` before the script")
    hint = question(word, _COMMANDS) or f"; the commands are {', '.join(_COMMANDS)}"
    fail(f"{word} is no command{hint}")


def _missing(error: ImportError, command: str) -> str:
    """Say which package a command lacks, and how to install it."""
    package = (error.name or "").partition(".")[0]
    way_out = f"pip install {shlex.quote(_INSTALL.get(package, package))}" if package else "mend its installation"
    return f"{command}: {package or 'a package'} cannot be imported ({error}); the command needs it; {way_out}"


def _parser() -> Parser:
    parser = Parser(prog=own_command(), description=vtp_plugin.__doc__)
    parser.add_argument("--version", action="version", version=f"vtp_plugin {vtp_plugin.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, (add_arguments, command, text) in _COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text)
        add_arguments(one)
        one.set_defaults(command=command)
    return parser
