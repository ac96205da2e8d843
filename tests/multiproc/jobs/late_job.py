"""A training job whose module took functions from Megatron by name, before the plugin is applied.

Its ``finalize_model_grads`` is the one that a tied embedding needs the plugin's replacement for.
"""

from __future__ import annotations

from contextlib import closing

from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func as choose_schedule

from tests.multiproc.cases.core_cases import Case, RankResult
from tests.multiproc.jobs.core_job import Trainer, applied, model_parallel
from tests.support.pool import init_gloo


def train(case: Case) -> RankResult:
    """Run a case on this rank with the functions that this module imported."""
    before = finalize_model_grads, choose_schedule
    init_gloo()
    with applied(case, force=False), model_parallel(case), closing(Trainer(case)) as trainer:
        trainer.config.finalize_model_grads_func = finalize_model_grads
        assert all(now is not then for now, then in zip(names(), before, strict=True)), "nothing was rebound"
        result = trainer.run()
    assert names() == before, "revert() left a replacement"
    return result


def names() -> tuple[object, object]:
    """Return what the imported names hold now."""
    return finalize_model_grads, choose_schedule
