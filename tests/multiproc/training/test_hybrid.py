"""Models of other layers than a GPT's: the refusals quote what stock Megatron says on CPUs."""

from __future__ import annotations

import re

import pytest

from tests.support.pool import Pool
from vtp_plugin.host.rules.rule import Verdict
from vtp_plugin.host.rules.table.rows import RULES

pytestmark = pytest.mark.needs("words_of_hybrid_models")


def test_refusals_quote_stock(pool: Pool) -> None:
    (errors,) = pool.run(1, "tests.multiproc.jobs.hybrid_job:errors_of_stock", {})
    # Of the layers without Mamba, Megatron's own ones are stand-ins without Transformer Engine, which cannot be built.
    assert all(errors.values()) and errors["*-"].startswith("StopIteration"), errors
    quoted_from = {
        "--hybrid-layer-pattern": ("M-", "local *-"),
        "--experimental-attention-variant gated_delta_net": ("G-", "gated_delta_net"),
    }
    for option, models in quoted_from.items():
        rule = next(rule for rule in RULES if rule.option == option and rule.verdict is not Verdict.REFUSED_ADAPTERS)
        quotes = re.findall(r"'([^']+)'", rule.reason)
        assert len(quotes) == len(models)
        for model in models:
            assert any(quote in errors[model] for quote in quotes), (rule.reason, errors[model])
