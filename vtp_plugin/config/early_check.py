"""What is certainly wrong with the command line of a run: found before torch or Megatron is imported, in a moment.

What may still come from elsewhere is left to the checks of the run itself: a script's own flags, a file of arguments, a
checkpoint. Megatron's parser knows all flags, so it alone can say that one is unknown and near none of the plugin's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import choose_cp_sizes
from vtp_plugin.config.vtp_flags import VTP_FLAGS, add_vtp_arguments, read_flags, reject_spaces
from vtp_plugin.errors import ConfigError, VtpError
from vtp_plugin.link.guard import require_protected
from vtp_plugin.plan.layout.size_checks import check_world, equal_dp
from vtp_plugin.util.own_command import own_command
from vtp_plugin.util.typos import question

_NAMES = tuple(flag.name for flag in VTP_FLAGS if flag.name.startswith("--vtp-"))
# With these the sizes, or the world, are not what the command line says.
_ELSEWHERE = ("--yaml-cfg", "--use-checkpoint-args", "--fake-process-group")


class _Parser(argparse.ArgumentParser):
    """Raises its errors."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{own_command()} run --help-all` lists the flags")


def check_command_line(
    argv: Sequence[str], given: VtpConfig, environment: Mapping[str, str], declared: Collection[str] = ()
) -> None:
    """Reject flags of the plugin that are misspelt, values that break their rule, and a wrong number of processes.

    And a way between sites that is public and not encrypted, before anybody waits for anybody.

    Args:
        argv: the script and its flags.
        given: what ``apply()`` was given.
        environment: variables of this process; the number of processes is not checked without ``WORLD_SIZE``.
        declared: flags that somebody else declares with the same meaning.

    Raises:
        ConfigError: one of them is certainly wrong; all ranks that were started with this command line find it.
    """
    script, *words = argv or [""]
    words = words[: words.index("--")] if "--" in words else words
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    # With another prefix it may be a flag of a package that the script imports, such as --tp-sizes.
    own = [name for name in names if sorted(name.lstrip("-")[:3]) == ["p", "t", "v"] and name not in _NAMES]
    unknown = {name: hint for name in own if (hint := question(name, _NAMES))}
    known = [flag.name for flag in VTP_FLAGS if flag.name in names]
    if {"-h", "--help"} & set(names) or not (unknown or known):
        return  # help is shown whatever else is wrong
    try:
        sources = _sources(Path(script)) if unknown else ""
        for name, hint in unknown.items():
            if not _mentions(sources, name):
                raise ConfigError(f"{name} is unknown{hint}")
        try:
            config = _read(words, given, declared)
            _check_processes(words, config, environment)
            require_protected(config.sites or (), config.link_is_protected, environment)
        except VtpError:
            # Read only now: a run that is right need not read its script and the modules beside it.
            sources = sources or _sources(Path(script))
            if not any(_declares(sources, name) for name in known):
                raise
    except VtpError as error:
        error.is_known_to_node = is_as_started(argv)
        raise


def is_as_started(argv: Sequence[str]) -> bool:
    """Tell whether a command line is that of this process: a launcher gives it to all ranks of a machine.

    Args:
        argv: the script and its flags; a script may have changed them.
    """
    number = len(argv) - 1
    return number <= 0 or sys.orig_argv[-number:] == list(argv[1:])


def _sources(script: Path) -> str:
    """Read the script and the modules beside it, which may declare flags of their own."""
    texts: list[str] = []
    for path in {script, *script.parent.glob("*.py")} if script.is_file() else ():
        with contextlib.suppress(OSError):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    return "\n".join(texts)


def _mentions(sources: str, name: str) -> bool:
    """Tell whether a flag stands in the script, or an argument of its name: it may be a flag of the script."""
    argument = name.lstrip("-").replace("-", "_")
    return re.search(rf"(?<![\w-])({re.escape(name)}|{argument})(?![\w-])", sources) is not None


def _declares(sources: str, name: str) -> bool:
    """Tell whether the script's own parser has a flag of the plugin, which then may mean something else there."""
    return re.search(rf"""add_argument\([^()]*["']{re.escape(name)}["']""", sources) is not None


def _read(words: Sequence[str], given: VtpConfig, declared: Collection[str]) -> VtpConfig:
    """Read the plugin's flags as the run will do."""
    reject_spaces(words, declared)
    parser = _Parser(add_help=False, allow_abbrev=False)
    args, _ = add_vtp_arguments(parser).parse_known_args(list(words))
    return read_flags(args, given, declared)


def _check_processes(words: Sequence[str], config: VtpConfig, environment: Mapping[str, str]) -> None:
    """Reject a number of processes that the sizes of no run divide, whatever else this one is told."""
    started, sizes = environment.get("WORLD_SIZE", ""), config.size_list
    if not isinstance(sizes, tuple) or not started.isdigit() or any(word.startswith(_ELSEWHERE) for word in words):
        return
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--context-parallel-size", type=int)
    try:
        cp = parser.parse_known_args(list(words))[0].context_parallel_size
    except argparse.ArgumentError:
        return  # Megatron's parser says what is wrong
    if cp is not None and cp < 1:
        return
    cp_sizes = choose_cp_sizes(config.cp_list, cp or 1, num_stages=len(sizes))
    if config.dp_list is None:
        equal_dp(sizes, cp_sizes, int(started))
        return
    stages = tuple(zip(sizes, cp_sizes, config.dp_list, strict=True))
    # A script may have another context-parallel size by default.
    if cp or config.cp_list or int(started) % sum(map(math.prod, stages)):
        check_world(stages, int(started))
