"""Fixtures for tests that train on several processes."""

from __future__ import annotations

import pytest

from tests.multiproc.cases import Runs
from tests.pool import Pool


@pytest.fixture(scope="session")
def runs(pool: Pool) -> Runs:
    """Training runs on the pool; uniform runs are kept for all tests of the session."""
    return Runs(pool)
