"""Parts of Megatron that a plan is compared with, and that not every version has."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import warnings
from typing import Any

import pytest


def hyper_comm_grid() -> Any:
    """Return Megatron's class of that name; skips the test where the version has none, or one without views."""
    reason = "this Megatron has no HyperCommGrid with views to compare with"
    found = pytest.importorskip("megatron.core.hyper_comm_grid", reason=reason).HyperCommGrid
    return found if hasattr(found, "register_view") else pytest.skip(reason)


def megatron_arguments() -> Any:
    """Return ``megatron.training.arguments``; skips the test where this Megatron is megatron.core alone."""
    if importlib.util.find_spec("megatron.training") is None:
        pytest.skip("this Megatron has no megatron.training: its wheel is megatron.core alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's, about packages that it can do without
        return importlib.import_module("megatron.training.arguments")


def megatron_parser(conflict_handler: str = "error") -> argparse.ArgumentParser:
    """Return a parser with the flags of Megatron; skips the test as :func:`megatron_arguments`."""
    arguments = megatron_arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron's own
        parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler=conflict_handler)
        return arguments.add_megatron_arguments(parser)
