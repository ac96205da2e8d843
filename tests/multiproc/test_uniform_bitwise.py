"""A uniform list, applied, forced on, or applied and taken back: the run is stock Megatron's to the last bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.multiproc.core_cases import Case, Plugin, Runs, assert_identical

SHAPES: dict[str, dict[str, Any]] = {
    "1f1b": {"tied": True},
    "interleaved": {"vpp": 2, "num_microbatches": 4, "overlap_p2p": True},
    "dp2": {"dp": 2, "tied": True, "optimizer": "adam", "distributed_optimizer": True, "overlap_grad_reduce": True},
}


@pytest.mark.parametrize(
    ("shape", "plugin"),
    [
        pytest.param(
            shape,
            plugin,
            marks=[] if plugin == "forced" or (shape, plugin) == ("1f1b", "reverted") else pytest.mark.full,
        )
        for shape in SHAPES
        for plugin in ("on", "forced", "reverted")
    ],
)
def test_uniform_list_is_stock_megatron(runs: Runs, shape: str, plugin: Plugin) -> None:
    case = Case(sizes=(2, 2), wants_weights=True, plugin=plugin, **SHAPES[shape])
    assert_identical(runs.run(case), runs.kept(replace(case, plugin="stock")))
