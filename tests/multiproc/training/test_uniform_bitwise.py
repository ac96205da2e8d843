"""A uniform list, applied, forced on, or applied and taken back: the run is stock Megatron's to the last bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.multiproc.cases.case_parts import Plugin
from tests.multiproc.cases.core_cases import Case, Runs, assert_identical

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
    case = Case.of(sizes=(2, 2), wants_weights=True, plugin=plugin, **SHAPES[shape])
    assert_identical(runs.run(case), runs.kept(case.but(plugin="stock")))


_SLICED: dict[str, Any] = {"has_bias": False, "seq": 12, "sequence_parallel": True}
DEFAULT_OF_SIZES = (("latent attention", "on"), ("sinks", "on"))
# What Megatron computes with several ranks is not what it computes with one; the plugin mends it for unequal stages.
OF_SIZES: dict[str, dict[str, Any]] = {
    "latent attention": {"attention": "latent normed", "gathered_attention": True},
    "sinks": {"attention": "sinks", "count_zeros": True},
    "sinkhorn": {"experts": "sinkhorn", **_SLICED},
    "experts of other sizes": {"experts": "balanced", "etp": 1, **_SLICED},
    "loss scales": {"experts": "balanced", "ep": 2, "dp": 2, "dtype": "fp16", "inf_at": (1, 1, 1), **_SLICED},
}


@pytest.mark.needs("latent_without_engine", cases=("latent attention-",))
@pytest.mark.needs("sinks", cases=("sinks-",))
@pytest.mark.needs("experts_of_other_sizes", cases=("experts of other sizes-",))
@pytest.mark.parametrize(
    ("shape", "plugin"),
    [
        pytest.param(shape, plugin, marks=[] if (shape, plugin) in DEFAULT_OF_SIZES else pytest.mark.full)
        for shape in OF_SIZES
        for plugin in ("on", "forced")
    ],
)
def test_what_is_mended_for_unequal_stages_is_stock_megatron_too(runs: Runs, shape: str, plugin: Plugin) -> None:
    case = Case.of(sizes=(2, 2), plugin=plugin, **OF_SIZES[shape])
    run, stock = runs.run(case), runs.kept(case.but(plugin="mapped"))
    for name in ("losses", "grad_norms", "num_zeros", "successful"):
        assert getattr(run, name) == getattr(stock, name), name
    assert len(run.grad_norms) >= 4
