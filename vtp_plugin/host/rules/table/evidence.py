"""What shows that options are supported, where rows of several subjects name it."""

from __future__ import annotations

PARITY = "tests/multiproc/training/test_parity.py::test_parity"
OPTIONS = "tests/multiproc/options/test_options.py::test_supported_option"
DEVICE = "tests/device/test_options.py"
ENGINE = f"{DEVICE}::test_option_that_needs_transformer_engine"  # run on one GPU, docs/guides/gpus.md
NEEDS_ENGINE = f"not run: needs CUDA and Transformer Engine, {DEVICE} does it"
CLIPPING = "tests/multiproc/training/test_optimizer.py::test_inf_on_a_rank_that_leads_nothing"
