"""What the documents say exists: links, tests, files, flags, keywords, keys of costs."""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import vtp_plugin
from tests.expected.of_megatron import megatron_parser
from tests.rules.doc_commands import DOCUMENTS, ROOT, joined, programs_of_the_project
from vtp_plugin.cli.main import _parser as cli_parser
from vtp_plugin.config.resolve import VTP_FLAGS, add_vtp_arguments
from vtp_plugin.host.rules.table.rows import documented
from vtp_plugin.plan.boundary.message_kind import MESSAGE_FORMS, MessageKind
from vtp_plugin.plan.schedule.cost.costs import COST_KEYS
from vtp_plugin.runtime.health.store import Topic
from vtp_plugin.util.text import said_of_attributes

LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")
PATH = re.compile(r"(?<![\w/.-])((?:tests|vtp_plugin|patches|benchmarks|examples|scripts|docs)/[\w./-]+)(?:::(\w+))?")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
KEY = re.compile(r"\b([a-z]+_(?:ms|kib)|mbit)=")
# Of MindSpeed, of MindSpeed-MM's converter, of pip and of containers.
FOREIGN_FLAGS = {
    "--cfg",
    "--encoder-dp-balance",
    "--mm-data",
    "--mm-model",
    "--mm-tool",
    *("--model", "--dataset", "--streaming"),  # of ms-swift
    *("--no-deps", "--gpus", "--ipc", "--network", "--cap-add", "--rm"),
    *("--ntasks-per-node", "--gpus-per-node", "--het-group", "--requeue", "--open-mode", "--no-kill"),  # of Slurm
    "--variable-seq-lengths",
    "--context-parallel-algo",
    "--log-tps",
    "--virtual-pipeline-model-parallel-size",
    *(rule.option for rule in documented("mindspeed")),
}
_GENERATED = ("megatron-options.md", "every-option.md", "ascend-options.md", "site-arguments.md")
WRITTEN_BY_HAND = [path for path in DOCUMENTS if path.name not in _GENERATED]


def named(paths: list[Path]) -> list[object]:
    return [pytest.param(path, id=path.name) for path in paths]


@cache
def known_flags() -> frozenset[str]:
    """Every flag of Megatron, the plugin, its commands, torchrun, and the project's own scripts."""
    host = megatron_parser(conflict_handler="resolve")
    parsers = [host, add_vtp_arguments(argparse.ArgumentParser()), get_args_parser(), *_commands(cli_parser())]
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    for path in programs_of_the_project():
        flags.update(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", path.read_text()))
    # torchrun takes both spellings.
    return frozenset(flags | {flag.replace("_", "-") for flag in flags})


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action.choices.values():
                yield from _commands(choice)


def slugs(path: Path) -> set[str]:
    """The anchors that a page's headings get where it is read."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_links_resolve(path: Path) -> None:
    for target in (a or b for a, b in LINK.findall(path.read_text())):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        found = (path.parent / file).resolve() if file else path
        assert found.exists(), f"{path.name}: {target}"
        assert not anchor or anchor in slugs(found), f"{path.name}: {target} is no heading of {found.name}"


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_files_and_tests_that_are_named_exist(path: Path) -> None:
    for name, function in PATH.findall(joined(path)):
        file = ROOT / name.rstrip(".")
        # A module may be named without its suffix; x stands for any module.
        assert file.exists() or file.with_suffix(".py").exists() or file.name == "x.py", name
        if function:
            assert re.search(rf"^ *def {function}\(", file.read_text(), re.MULTILINE), f"{name}::{function}"


@pytest.mark.needs("documents_of_0_19")
@pytest.mark.parametrize("path", named(WRITTEN_BY_HAND))
def test_flags_that_are_named_exist(path: Path) -> None:
    unknown = set(FLAG.findall(path.read_text())) - known_flags() - FOREIGN_FLAGS
    # Words of ms-swift's flags are joined by underscores; tests/swift looks for them where it is installed.
    assert not {flag for flag in unknown if "_" not in flag}


def test_every_flag_and_keyword_is_documented() -> None:
    """docs/reference/flags.md is written from VTP_FLAGS; this is about what else there is."""
    declared = {flag.name for flag in VTP_FLAGS}
    parsed = {
        flag for action in add_vtp_arguments(argparse.ArgumentParser())._actions for flag in action.option_strings
    }
    assert parsed - {"-h", "--help"} == declared
    keywords = set(inspect.signature(vtp_plugin.apply).parameters)
    assert {flag.keyword for flag in VTP_FLAGS} - {None} == keywords
    table = (ROOT / "docs/reference/flags.md").read_text()
    assert [name for name in (*declared, *keywords) if f"`{name}" not in table] == []


def test_every_key_of_costs_is_documented_and_exists() -> None:
    table = (ROOT / "docs/reference/flags.md").read_text()
    assert [key for key in COST_KEYS if f"| `{key}` |" not in table] == []
    named_keys = {key for path in WRITTEN_BY_HAND for key in KEY.findall(path.read_text())}
    assert named_keys and named_keys <= set(COST_KEYS)


def test_every_kind_of_message_is_documented() -> None:
    assert set(MESSAGE_FORMS) == set(MessageKind)
    table = (ROOT / "docs/guides/edge-cloud.md").read_text()
    assert [kind.value for kind in MessageKind if f"| {kind.value} | " not in table] == []


def test_everything_that_the_store_holds_is_documented() -> None:
    table = (ROOT / "docs/guides/edge-cloud.md").read_text()
    said = said_of_attributes(Topic)
    assert [topic.key for topic in Topic if f"| `{topic.key}` | {said[topic.name]} |" not in table] == []


def test_queries_are_documented() -> None:
    table = (ROOT / "docs/reference/flags.md").read_text()
    names = set(vtp_plugin.__all__) - {"__version__"}
    assert [name for name in names if f"`{name}()`" not in table and f".{name}()`" not in table] == []


def test_the_code_of_the_core_only_page_is_the_file() -> None:
    code = (ROOT / "examples" / "core_only.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "docs/guides/core-only.md").read_text()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", named(DOCUMENTS))
def test_no_document_points_to_an_issue(path: Path) -> None:
    assert not re.search(r"\bissue \d+", path.read_text())
