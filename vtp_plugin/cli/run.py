"""``run SCRIPT ...``: run a Megatron training script with the plugin applied.

What is certainly wrong with the command line ends it at once, before torch or Megatron is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import vtp_plugin
from vtp_plugin.api import announce_exit, apply_flags, choose_device, report_failures
from vtp_plugin.cli import brief
from vtp_plugin.cli.command_base import Parser, print_error
from vtp_plugin.cli.path import is_rank_script
from vtp_plugin.cli.run_flags import MOST_USED
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import add_vtp_arguments, check_command_line, hide_taken_flags, merge, peek_device
from vtp_plugin.elastic.progress import (
    RUN_FOLDER_VARIABLE,
    leave_marker,
    note_failed_start,
    require_unmarked,
    run_folder,
)
from vtp_plugin.errors import ConfigError, VtpError, is_final
from vtp_plugin.host.mindspeed import ImportWatch, flags_of_mindspeed, has_mindspeed
from vtp_plugin.runtime.health.redaction import START_PATIENCE_S, describe_error, say_once
from vtp_plugin.util import log

if TYPE_CHECKING:
    from vtp_plugin.elastic.join import Membership

# For the ranks of other nodes.
_OTHERS_S = 120.0


def add_arguments(parser: Parser) -> None:
    """Declare the script. The flags are in the help text only: the script's parser reads them."""
    parser.usage = "%(prog)s [-h] [--brief] SCRIPT [its flags, those of Megatron, and those below]"
    parser.add_argument(
        "--brief",
        action="store_true",
        help="show the layout, one line for each logged step, each warning once and what ends the run; all else goes "
        "into a file, which is named at the start",
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script; everything after it is for the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="such as --vtp-size-list 1,4,4")
    flags = Parser(add_help=False)
    before = [*flags._action_groups]
    add_vtp_arguments(flags)
    parser.shorten([group for group in flags._action_groups if group not in before], MOST_USED)


def run(options: argparse.Namespace) -> None:
    """Apply the plugin and run the script."""
    if options.unknown:
        _fail(f"{options.unknown[0]} stands before the script; write: python -m vtp_plugin run SCRIPT {{flags}}")
    script = Path(options.script)
    if not script.is_file():
        _fail(f"script {options.script} does not exist; give the path of the training script")
    # As `python SCRIPT` does: the script sees its arguments only, and imports the modules beside it first. The words
    # come from the command line, since argparse would remove a "--" that is meant for the script.
    sys.argv = [options.script, *options.argv[options.argv.index(options.script, 1) + 1 :]]
    sys.path[0] = str(script.resolve().parent)
    seat: Membership | None = None
    is_fitted = any(word.partition("=")[0] == "--vtp-stages" for word in sys.argv)
    try:
        if is_fitted:
            folder = run_folder(sys.argv)
            require_unmarked(folder)
            os.environ[RUN_FOLDER_VARIABLE] = "" if folder is None else str(folder)
        _check()
        if options.brief:
            _begin_brief(script)
        if is_fitted:
            from vtp_plugin.cli.elastic_run import fit_run  # not at the top: other runs do without what a fit imports

            sys.argv[:], seat = fit_run(sys.argv)
            report_failures()  # also what ends the script before it has asked Megatron for anything
        _note_missing_sizes()
        if is_rank_script(script):
            importlib.import_module("swift.megatron")  # on an NPU MindSpeed's adaptor, too
            sys.argv[1:] = apply_flags(sys.argv[1:])
        elif has_mindspeed():
            _apply_after_adaptor()
        else:
            vtp_plugin.apply()
        runpy.run_path(options.script, run_name="__main__")
        _end(seat)
    except VtpError:
        report_failures()
        raise
    except SystemExit as leave:
        # Python takes it for a normal end: rank 0 would wait for the others, and they for rank 0.
        is_consequence = announce_exit(leave)
        if log.is_brief() and leave.code not in (None, 0):
            log.error(f"the script has ended itself ({describe_error(leave)}); its last lines say why")
        if leave.code in (None, 0):
            _end(seat)
        elif is_final(leave):
            leave_marker("the script rejected its flags and ended with status 2, see its log")
        elif not is_consequence:
            note_failed_start(leave)
        raise


def _check() -> None:
    """Leave at once if the command line is certainly wrong."""
    try:
        check_command_line(sys.argv, VtpConfig(), os.environ, flags_of_mindspeed())
    except VtpError as error:
        leave_marker(str(error))
        _fail(str(error))


def _begin_brief(script: Path) -> None:
    """Lead the output away, unless help is asked for; leave at once where no step would be shown."""
    names = {word.partition("=")[0] for word in sys.argv}
    if {"-h", "--help"} & names:
        return
    if is_rank_script(script):
        _fail("--brief; ms-swift logs its steps itself, so none would be shown; leave --brief out")
    if "--vtp-size-list" not in names:
        _fail("--brief without --vtp-size-list; no step would be shown; give the list, such as 1,1 for equal stages")
    brief.begin()


def _note_missing_sizes() -> None:
    """Say on rank 0 that nothing asks for stages of their own sizes; a script may still do so in `apply()`."""
    words = [word.partition("=")[0] for word in sys.argv]
    is_asked = {"--vtp-size-list", "--vtp-bridges", "--yaml-cfg"} & {*words}
    if not is_asked and os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & {*words}:
        print("vtp_plugin: no --vtp-size-list: Megatron runs as it is, unless the script gives sizes", file=sys.stderr)


def _fail(message: str) -> NoReturn:
    """Leave with exit code 2; of the ranks that a launcher has started on a machine, one says why."""
    say_once(message, print_error, limit_s=START_PATIENCE_S)
    _tell_other_nodes(message)
    sys.exit(2)


def _tell_other_nodes(message: str) -> None:
    """Post why this node ends where all ranks meet: the command lines of other nodes may be right, and they would wait.

    They come once they have imported Megatron.
    """
    here, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if not (here.isdigit() and world.isdigit() and int(here) < int(world)):
        return

    def fail() -> NoReturn:
        raise ConfigError(message)

    from vtp_plugin.session.ranks import AllRanks  # imports torch

    with contextlib.suppress(VtpError):
        AllRanks(lambda: _OTHERS_S, lambda: None).meet(os.environ, fail)


def _end(seat: Membership | None) -> None:
    if seat is not None:
        seat.end()


def _apply_after_adaptor() -> None:
    """Apply the plugin once the script has imported MindSpeed's adaptor, or uses Megatron without it."""
    # The stand-in for a device comes before MindSpeed, which keeps references into torch.
    choose_device(merge(VtpConfig(), {"device": peek_device(sys.argv)}).device)
    words = list(sys.argv)

    def apply() -> None:
        watch.stop()
        sys.argv[:] = words
        vtp_plugin.apply()

    def hide() -> None:
        sys.argv[:] = hide_taken_flags(words)

    watch = ImportWatch(on_megatron=apply, before_adaptor=hide, after_adaptor=apply)
