"""What a stranger meets on the page of the repository: how to cite it, forms for issues and for pull requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.rules.doc_commands import commands_in_code
from tests.rules.import_rules import ROOT
from vtp_plugin import __version__
from vtp_plugin.cli.main import _parser
from vtp_plugin.host.versions import HOSTS, family_of
from vtp_plugin.util.typed_json import read_toml

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Megatron brings")
GITHUB = ROOT / ".github"
FORMS = [GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml" for name in ("bug", "feature")]
# Of GitHub's form schema: what each kind of question must have among its attributes.
NEEDED = {
    "markdown": {"value"},
    "textarea": {"label"},
    "input": {"label"},
    "dropdown": {"label", "options"},
    "checkboxes": {"label", "options"},
}
FILE = re.compile(r"(?<![\w/.-])(?:docs/[\w/-]+|[A-Z]+)\.md")


def test_the_citation_says_what_the_project_says() -> None:
    """The schema itself was asked once, with cffconvert: version 1.2.0."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project: Any = read_toml(ROOT / "pyproject.toml")["project"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()  # what the schema requires
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert citation["title"].replace("_", "-") == project["name"]
    assert (citation["version"], citation["license"]) == (__version__, project["license"])
    assert (citation["authors"], citation["keywords"]) == (project["authors"], project["keywords"])
    # Not known yet, as [project.urls] is not.
    assert not {"url", "repository-code", "doi", "identifiers"} & citation.keys()


def read(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one_that_github_shows(path: Path) -> None:
    form = read(path)
    assert form.keys() <= {"name", "description", "labels", "body", "title", "assignees", "projects", "type"}
    assert form["name"] and form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert questions
    names = [part["id"] for part in questions]
    assert len({*names}) == len(names) and all(re.fullmatch(r"[\w-]+", name) for name in names)
    labels = [part["attributes"]["label"] for part in questions]
    assert len({*labels}) == len(labels)
    for part in form["body"]:
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        assert NEEDED[part["type"]] <= part["attributes"].keys()
        assert all(isinstance(option, str) for option in part["attributes"].get("options", ()))


def test_the_bug_form_asks_for_what_is_needed() -> None:
    needed = {part["id"] for part in read(FORMS[0])["body"] if part.get("validations", {}).get("required")}
    assert {"what", "error", "command", "uniform", "doctor"} <= needed
    assert "`vtp doctor --json`" in FORMS[0].read_text()


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_commands_of_a_form_exist(path: Path) -> None:
    """Those of the form for pull requests are tested with the documents'."""
    found = list(commands_in_code(path.read_text(), source=path.name))
    assert found
    for command in found:
        program, *words = command.words
        assert program == "vtp", str(command)
        options = _parser().parse_args(words)
        assert callable(options.command)


@pytest.mark.parametrize("path", [*FORMS, GITHUB / "PULL_REQUEST_TEMPLATE.md"], ids=lambda path: path.stem)
def test_files_of_a_form_exist(path: Path) -> None:
    found = FILE.findall(path.read_text())
    assert found and all((ROOT / name).is_file() for name in found)


def test_blank_issues_are_a_choice() -> None:
    """No contact links: they need the address of the repository, which is not known."""
    assert read(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}


def test_containers_are_named_for_every_megatron_and_say_whether_they_were_run() -> None:
    page = (ROOT / "docs" / "start" / "containers.md").read_text()
    tables = re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for table in tables for row in table.splitlines()[2:]]
    assert len(tables) == 3
    assert {row[-1].partition(" (")[0] for row in rows} <= {"run", "not run", "not supported"}
    of_nvidia = [row[0] for row in rows if row[1].endswith("-py3")]
    families = [family_of(version) for version in of_nvidia if re.fullmatch(r"[\d.]+", version)]
    assert {family.name for family in families if family} == {host.name for host in HOSTS}
