"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for jobs on 1 to 8 ranks, kept alive over the whole session."""
    with Pool(max_workers=8) as workers:
        yield workers
