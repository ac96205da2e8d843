"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.hang.ranks import Server
from tests.multiproc.cases.script_cases import Scripts
from tests.support.hosts import host_name, left_out, tree_problem, unfitting, use_tree
from tests.support.pool import TIMES, Pool
from tests.support.times import Times

gc.disable()  # until all is collected: a third of the time would go there, and next to nothing is garbage
use_tree()

# Every connection to a rendezvous store has the resolver look up the name of 127.0.0.1, where /etc/hosts does not help:
# a name server that drops one of many such queries in a row costs its timeout each time, five seconds by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell that starts tests behind it (&) lets them ignore SIGINT, and so what they send themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says nothing on a busy machine.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for jobs on 1 to 13 ranks, kept alive over the whole session; only whole grids need over 8."""
    with Pool(max_workers=13) as workers:
        yield workers


@pytest.fixture(scope="session")
def script_pool() -> Iterator[Scripts]:
    """Workers that do nothing but fork scripts: a process that has trained has threads, and its forks hang."""
    with Scripts(max_workers=12) as workers:
        yield workers


@pytest.fixture(scope="session")
def scripts(script_pool: Scripts) -> Scripts:
    """The same, by a shorter name."""
    return script_pool


@pytest.fixture(scope="session")
def rank_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that has imported torch and Megatron and forks ranks that are killed, stopped or started wrongly."""
    server = Server(tmp_path_factory.mktemp("rank-server") / "log")
    yield server
    server.close()


def pytest_configure(config: pytest.Config) -> None:
    """Measure the tests of `make`, but for those that a test runs."""
    if TIMES in os.environ and "PYTEST_CURRENT_TEST" not in os.environ:
        config.pluginmanager.register(Times(is_worker=hasattr(config, "workerinput")))


def pytest_sessionstart() -> None:
    """End at once where all whole scripts would fail."""
    if problem := tree_problem():
        raise pytest.UsageError(problem)


def pytest_collection_finish() -> None:
    """Let no collection of garbage look at what was imported and collected, a million objects; apply() makes some."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Name the host above the tests."""
    return f"host: {host_name() or 'no known Megatron'}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this host leaves out; before tests are deselected, so that marks that fit no case are seen."""
    is_whole = not any("::" in place for place in config.args) and not config.getoption("lf", False)
    if is_whole and (names := unfitting(items)):
        raise pytest.UsageError(f"marks needs(..., cases=...) fit no case: {', '.join(sorted(names))}; mend the marks")
    for item, reason in left_out(items, host_name()):
        item.add_marker(pytest.mark.skip(reason=reason))
