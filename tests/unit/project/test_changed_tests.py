"""`make test-changed` chooses the tests that a change can reach."""

from __future__ import annotations

import pytest

from scripts.changed_tests import SPINE, House


@pytest.fixture(scope="module")
def house() -> House:
    return House()


@pytest.mark.parametrize(
    ("file", "chosen", "not_chosen"),
    [
        ("vtp_plugin/cli/search.py", ["tests/unit/cli/"], ["tests/multiproc/training/test_parity.py"]),
        (
            "vtp_plugin/tune/fit/fit_layout.py",
            ["tests/unit/elastic/test_join.py"],
            ["tests/multiproc/link/test_link_up.py"],
        ),
        # By a name in a text, as pools of ranks take it.
        ("tests/multiproc/jobs/bridge_job.py", ["tests/multiproc/bridges/test_bridges.py"], ["tests/unit/cli/"]),
        ("tests/unit/cli/test_search.py", ["tests/unit/cli/test_search.py"], ["tests/unit/cli/test_cli.py"]),
        ("docs/guides/link.md", ["tests/house/", "tests/unit/project/"], ["tests/multiproc/link/test_link_up.py"]),
    ],
)
def test_a_change_chooses_what_it_reaches(house: House, file: str, chosen: list[str], not_chosen: list[str]) -> None:
    found = house.reached_by([file])
    assert {*chosen, *SPINE} <= {*found} and not {*not_chosen} & {*found}, found


def test_nothing_changed_is_the_spine(house: House) -> None:
    assert house.reached_by([]) == sorted(SPINE)
