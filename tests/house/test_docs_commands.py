"""Every shell command of the documents runs, or, where it takes many ranks or minutes, would be accepted."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from tests.expected.of_megatron import megatron_parser
from tests.rules.doc_commands import DOCUMENTS, Command, commands
from tests.rules.launcher_commands import run_as_printed
from tests.support.hosts import ROOT
from vtp_plugin import cli
from vtp_plugin.cli.main import _parser
from vtp_plugin.config import VtpConfig
from vtp_plugin.config.resolve import add_vtp_arguments, read_flags

COMMANDS = list(dict.fromkeys(command for path in DOCUMENTS for command in commands(path)))
# Of the plugin's commands those that only read and print; doctor and run have tests of their own.
CHEAP = ("plan", "draw", "simulate")
GUIDES = {path.name for path in (ROOT / "docs/guides").glob("*.md")}  # test_guides_begin.py runs theirs
RUNS_HERE = [
    c for c in COMMANDS if c.words[0] == "torchrun" and "examples/pretrain_gpt.py" in c.words and c.source not in GUIDES
]


@pytest.fixture(scope="module")
def flags() -> argparse.ArgumentParser:
    """Megatron's flags and the plugin's, as a script under the plugin has them."""
    return add_vtp_arguments(megatron_parser())


def check_flags(flags: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Parse a script's words."""
    read_flags(flags.parse_args(list(words)), VtpConfig())


def check_file(path: str, words: Sequence[str]) -> None:
    """Find a script of the project, and in it every flag that it is given."""
    text = (ROOT / path).read_text()
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in text, f"{path} has no {word}"


def check_plugin(command: Command, words: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a cheap command of the plugin in an empty folder; of the others only parse the words."""
    if words and words[0] in CHEAP and len(words) > 1:
        (tmp_path / "docs").mkdir()
        monkeypatch.chdir(tmp_path)
        cli.main(list(words))
    elif words:
        with pytest.raises(SystemExit) as ended:
            cli.main([words[0], "--help"])
        assert ended.value.code == 0, str(command)


@pytest.mark.needs("sft_tokenizer", cases=("fine-tuning.md: torchrun",))
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: f"{command.source}: {command}"[:90])
def test_command_is_accepted(
    command: Command, flags: argparse.ArgumentParser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = command.words
    if program.startswith("--"):
        check_flags(flags, command.words)
    elif program.startswith("examples/"):
        path = ROOT / program
        assert os.access(path, os.X_OK), program
        scripts = (*path.parent.glob("*.sh"), *path.parent.parent.glob("*.sh"), ROOT / "examples/edge_cloud/launch.sh")
        sources = "".join(each.read_text() for each in scripts)
        assert all(variable.split("=")[0] in sources or "SOCKET" in variable for variable in command.variables)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert re.search(rf"^{words[0]}:", makefile, re.MULTILINE)
        assert all(f"$({word.partition('=')[0]})" in makefile for word in words[1:])
    elif program == "pip":
        words = [word for word in words if word != "--no-deps"]
        package = re.fullmatch(r"(?:\.|vtp-plugin)(?:\[([\w-]+)\])?", words[1])
        assert words[0] == "install" and len(words) == 2 and package
        extra = (package[1] or "").replace("-", "[-.]")  # "host-0.19" is called host-0-19
        assert not extra or re.search(rf'^"?{extra}"? = \[', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    elif program == "torchrun":
        check_torchrun(flags, words)
    elif program == "vtp":
        check_plugin(command, words, tmp_path, monkeypatch)
    elif words[0] == "-m" and words[1] == "vtp_plugin":
        check_plugin(command, words[2:], tmp_path, monkeypatch)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words[1]
        check_file(f"{words[1].replace('.', '/')}.py", words[2:])
    elif program == "python":
        check_file(words[0], words[1:])
    elif program == "megatron":
        assert words[0] in ("sft", "pt", "rlhf")  # their flags: tests/swift, where ms-swift is installed
    else:
        assert program == "jq"


def check_torchrun(flags: argparse.ArgumentParser, words: Sequence[str]) -> None:
    launch = get_args_parser().parse_args(list(words))
    script, rest = launch.training_script, launch.training_script_args
    if not launch.module:
        check_file(script, rest)
        return
    if (script, rest[0]) == ("vtp_plugin", "certify"):
        assert callable(_parser().parse_args(rest).command)
        return
    assert (script, rest[0]) == ("vtp_plugin", "run")
    rest = [word for word in rest if word != "--brief"]
    if rest[1].startswith("$(vtp path "):
        return  # as of megatron
    assert rest[1] in ("pretrain_gpt.py", "pretrain_vlm.py") or (ROOT / rest[1]).exists()
    check_flags(flags, rest[2:])
    args = flags.parse_args(rest[2:])
    if args.vtp_size_list == "auto":
        return  # as many as there are
    sizes = [int(size) for size in args.vtp_size_list.split(",")]
    replicas = [int(number) for number in (args.vtp_dp_list or ",".join("1" * len(sizes))).split(",")]
    num_ranks = sum(size * number for size, number in zip(sizes, replicas, strict=True))
    assert int(launch.nproc_per_node) == num_ranks if launch.nnodes == "1:1" else int(launch.nproc_per_node) < num_ranks


def test_the_reader_finds_commands() -> None:
    assert len(COMMANDS) > 30
    assert len(RUNS_HERE) == 1, "pages show different first runs"


@pytest.mark.needs("our_example")
@pytest.mark.full
@pytest.mark.parametrize("command", RUNS_HERE, ids=lambda command: command.source)
def test_first_run_of_the_readme(command: Command, tmp_path: Path) -> None:
    printed = run_as_printed(tmp_path, str(command), limit_s=250)
    assert re.findall(r"iteration +(\d+)/ +10 .* lm loss: ", printed) == [str(n) for n in range(1, 11)]


def shown_outputs() -> list[object]:
    """Commands of the plugin that a document shows with what they print, between the next two fences."""
    command = r"^    (vtp (?:plan|simulate) [^\n]*(?:\\\n[^\n]*)*)\n"
    pattern = re.compile(command + r"(?:(?!    |```)[^\n]*\n)*```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
    shown = {
        (words.replace("\\\n", " "), output): f"{path.name}: {words}"[:60]
        for path in reversed(DOCUMENTS)  # named after the first that shows it
        for words, output in pattern.findall(path.read_text())
    }
    return [pytest.param(*case, id=name) for case, name in shown.items()]


def test_the_reader_finds_outputs() -> None:
    assert len(shown_outputs()) >= 3


@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_a_command_prints_what_is_shown(command: str, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every line that is shown, in this order; `...` stands for others."""
    cli.main(shlex.split(command)[1:])
    printed = iter(capsys.readouterr().out.splitlines())
    assert [line for line in output.splitlines() if line != "..." and line not in printed] == []
