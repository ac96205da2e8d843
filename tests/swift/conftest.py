"""Models and data of the tests of ms-swift, which run only where it is installed: `make env HOST=swift`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

KINDS = ("qwen2", "qwen2-tied-odd", "qwen3", "llama", "qwen3_moe")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("mcore_bridge") is None:
        skip = pytest.mark.skip(reason="ms-swift is not installed; make env HOST=swift, then make test-swift")
        for item in items:
            if "tests/swift/" in item.nodeid:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model of each kind, and with data."""
    from tests.swift.small_model import write_models

    folder = tmp_path_factory.mktemp("models")
    write_models(folder, KINDS)
    return folder
